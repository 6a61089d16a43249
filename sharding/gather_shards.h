#ifndef FULLSHARD_SHARDING_GATHER_SHARDS_H_
#define FULLSHARD_SHARDING_GATHER_SHARDS_H_

#include "ATen/core/Tensor.h"
#include "fullshard/sharding/flat_parameter.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace fullshard::internal {

// Returns all ranks' parts of `shard`, a tensor that is split as `flat` is:
// [padded]. `shard` itself if the group has one rank.
//
// Collective. `what` names the tensor in messages.
at::Tensor gather_shards(const FlatParameter& flat, const at::Tensor& shard,
                         c10d::Backend& group, const char* what);

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_GATHER_SHARDS_H_
