#ifndef FULLSHARD_CORE_MAX_OVER_RANKS_H_
#define FULLSHARD_CORE_MAX_OVER_RANKS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "fullshard/core/process_groups.h"

namespace fullshard {

// Returns the largest `value` of all ranks: with 0 and 1, whether any rank has
// something to say.
//
// Collective. `what` names the call in the messages of a time-out.
int64_t max_over_ranks(const ProcessGroups& groups, int64_t value,
                       const char* what);

// Returns `status`, or, where it is OK but that of another rank is not,
// kAborted: "<where>: failed on another rank; see its message".
//
// Collective.
absl::Status agree(const ProcessGroups& groups, const absl::Status& status,
                   const std::string& where);

}  // namespace fullshard

#endif  // FULLSHARD_CORE_MAX_OVER_RANKS_H_
