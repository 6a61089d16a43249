#ifndef FULLSHARD_SHARDING_UNSHARD_H_
#define FULLSHARD_SHARDING_UNSHARD_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard::internal {

// Returns the units of these names, or all.
// Errors: kNotFound naming the first that there is not, and those there are.
absl::StatusOr<std::vector<Unit*>> find_units(
    const ShardedState& state, const std::vector<std::string>& names);

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_UNSHARD_H_
