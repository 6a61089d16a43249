#ifndef FULLSHARD_SHARDING_SHARD_OPTIONS_H_
#define FULLSHARD_SHARDING_SHARD_OPTIONS_H_

#include <functional>
#include <optional>
#include <string>

#include "ATen/core/Tensor.h"
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

// What a unit may have of its own. Given as the rest of ShardOptions says.
struct UnitOptions {
  // As in MixedPrecision.
  std::optional<at::ScalarType> param_dtype;
  std::optional<at::ScalarType> reduce_dtype;
  // Where units differ in param_dtype: cast the floating inputs of every
  // operator that takes one of this unit's parameters to their dtype. (Modules
  // of LibTorch have no forward hooks; the operators see the same.) Autocast,
  // where it is on, decides instead.
  bool cast_forward_inputs = true;
  // Gather again for backward; see ShardingStrategy. With a reshard_group_size
  // of k among the ProcessGroupsOptions the unit stays split over k ranks in
  // between, and backward gathers among those.
  bool reshard_after_forward = true;
};

struct ShardOptions {
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  MixedPrecision mixed_precision;
  // Modules that become units. Default: the whole model is one.
  WrapPolicy wrap_policy;
  // Changes the options of single units. `name` is UnitInfo::name.
  std::function<void(const std::string& name, const torch::nn::Module& module,
                     UnitOptions& options)>
      unit_options;
  // Give every rank the parameters and buffers of rank 0 before sharding. Off:
  // the ranks must have initialised them alike.
  bool sync_module_states = false;
  // Keep master shards, their gradients and the optimizer's state in host
  // memory; only what a unit computes with is on the device. Where that is a
  // CPU too, the two are kept apart all the same: nothing is shared between
  // ranks and every gather and reduction copies.
  bool offload = false;
  // Gather the next unit while this one computes. At most two gathers are in
  // flight.
  bool prefetch = true;

  // Parameters, by name, that stay whole on every rank: broadcast with
  // sync_module_states, part of state dicts and of the clipped norm, their
  // gradients averaged over all ranks, stepped by an optimizer of the user's.
  std::function<bool(const std::string& name)> ignored;
  // Called once per module that owns tensors on the meta device, after they
  // were given memory on the rank's device, to initialise them: as
  // reset_parameters(). One unit after the other, so that a rank holds at most
  // one in full. Unset: meta tensors are an error.
  std::function<void(const std::string& name, torch::nn::Module& module)>
      materialize;

  // Gradients are the sum over ranks divided by this. Default: the number of
  // ranks (shard group x replicas).
  std::optional<double> gradient_divide_factor;
  // Replaces the reduce-scatter over the shard group. `gradients` are this
  // rank's, [N * chunk] in the reduce dtype, and may be overwritten; `shard`,
  // [chunk] in the reduce dtype, receives the result as it enters the replicas'
  // all-reduce or the gradient shard, divided already. Collective.
  std::function<void(const std::string& unit, at::Tensor& gradients,
                     at::Tensor& shard)>
      reduce_hook;
  // Replaces the all-reduce of a gradient shard, [chunk] in the reduce dtype,
  // over the replicas; what it leaves there is the gradient, divided already.
  std::function<void(const std::string& unit, at::Tensor& shard)>
      all_reduce_hook;
};

}  // namespace fullshard

#endif  // FULLSHARD_SHARDING_SHARD_OPTIONS_H_
