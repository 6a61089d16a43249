#ifndef FULLSHARD_CORE_STATUS_H_
#define FULLSHARD_CORE_STATUS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

// Returns the status of `expr` from the enclosing function unless it is OK.
#define FS_RETURN_IF_ERROR(expr)                 \
  do {                                           \
    ::absl::Status fs_status = (expr);           \
    if (!fs_status.ok()) return fs_status;       \
  } while (false)

// Assigns the value of the StatusOr `expr` to `lhs`, or returns its status.
#define FS_ASSIGN_OR_RETURN(lhs, expr) \
  FS_ASSIGN_OR_RETURN_IMPL_(FS_STATUS_CONCAT_(fs_or_, __LINE__), lhs, expr)
#define FS_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr)   \
  auto result = (expr);                                \
  if (!result.ok()) return std::move(result).status(); \
  lhs = std::move(result).value()
#define FS_STATUS_CONCAT_(a, b) FS_STATUS_CONCAT_IMPL_(a, b)
#define FS_STATUS_CONCAT_IMPL_(a, b) a##b

namespace fullshard {

// Returns `status` with "where: " put before its message; OK stays OK.
inline absl::Status annotate(const absl::Status& status,
                             absl::string_view where) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(where, ": ", status.message()));
}

}  // namespace fullshard

#endif  // FULLSHARD_CORE_STATUS_H_
