#ifndef FULLSHARD_SHARDING_SPLIT_INTO_UNITS_H_
#define FULLSHARD_SHARDING_SPLIT_INTO_UNITS_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/sharding/shard_options.h"
#include "fullshard/sharding/unit.h"
#include "torch/nn/module.h"

namespace fullshard::internal {

// Divides the parameters of `root` into units and shards them, one unit after
// the other: a module that the wrap policy matches owns the parameters below
// it that no inner match owns; the root owns the rest. A parameter that several
// units reach is hoisted to their lowest common unit.
//
// Collective if options.sync_module_states. Units are in module order, parents
// first.
// Errors: kInvalidArgument if the policy matches nothing (lists the types
// found), if the module has no parameters, or if it is sharded already.
absl::StatusOr<std::vector<std::unique_ptr<Unit>>> split_into_units(
    torch::nn::Module& root, const ProcessGroups& groups,
    const ShardOptions& options);

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_SPLIT_INTO_UNITS_H_
