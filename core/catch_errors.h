#ifndef FULLSHARD_CORE_CATCH_ERRORS_H_
#define FULLSHARD_CORE_CATCH_ERRORS_H_

#include <c10/util/Exception.h>

#include <exception>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace fullshard {

// Calls `f`, which returns a Status or StatusOr. What it throws, LibTorch's
// errors and others, becomes kUnavailable: "<where>: <message>". A rank calls
// what can fail on it alone through this, so that it still comes to the next
// collective and the others do not wait for it there.
template <class F>
auto catch_errors(absl::string_view where, const F& f) -> decltype(f()) {
  try {
    return f();
  } catch (const c10::Error& error) {
    return absl::UnavailableError(
        absl::StrCat(where, ": ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat(where, ": ", error.what()));
  }
}

}  // namespace fullshard

#endif  // FULLSHARD_CORE_CATCH_ERRORS_H_
