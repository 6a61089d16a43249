#ifndef FULLSHARD_IO_UTF8_H_
#define FULLSHARD_IO_UTF8_H_

#include "absl/strings/string_view.h"

namespace fullshard {

// True for well-formed UTF-8 without surrogates (RFC 3629).
bool is_utf8(absl::string_view text);

}  // namespace fullshard

#endif  // FULLSHARD_IO_UTF8_H_
