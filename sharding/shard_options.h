#ifndef FULLSHARD_SHARDING_SHARD_OPTIONS_H_
#define FULLSHARD_SHARDING_SHARD_OPTIONS_H_

#include "fullshard/precision/mixed_precision.h"
#include "fullshard/sharding/wrap_policy.h"

namespace fullshard {

// N is the size of the shard group, W of the world.
enum class ShardingStrategy {
  // Parameters, gradients and optimizer state are split over all ranks;
  // parameters are gathered again for backward.
  kFullShard,
  // As above, but parameters stay unsharded from forward to backward: half the
  // gathers, more memory.
  kShardGradOp,
  // kFullShard inside the shard group, all-reduce over the W / N replicas.
  kHybridShard,
  // kShardGradOp inside the shard group, all-reduce over the replicas.
  kHybridShardZero2,
  // Every rank keeps everything; gradients are all-reduced.
  kNoShard,
};

struct ShardOptions {
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  MixedPrecision mixed_precision;
  // Modules that become units. Default: the whole model is one.
  WrapPolicy wrap_policy;
  // Give every rank the parameters and buffers of rank 0 before sharding. Off:
  // the ranks must have initialised them alike.
  bool sync_module_states = false;
  // Gather the next unit while this one computes. At most two gathers are in
  // flight.
  bool prefetch = true;
};

}  // namespace fullshard

#endif  // FULLSHARD_SHARDING_SHARD_OPTIONS_H_
