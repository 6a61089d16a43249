#ifndef FULLSHARD_SHARDING_UNSHARD_H_
#define FULLSHARD_SHARDING_UNSHARD_H_

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard::internal {

// Gathers `shard`, [chunk], of every rank: [padded]. `shard` itself if the
// group has one rank. Collective.
at::Tensor gather_full(const FlatParameter& flat, const at::Tensor& shard,
                       c10d::Backend& group, const std::string& unit);

// Returns the units of these names, or all.
// Errors: kNotFound naming the first that there is not, and those there are.
absl::StatusOr<std::vector<Unit*>> find_units(
    const ShardedState& state, const std::vector<std::string>& names);

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_UNSHARD_H_
