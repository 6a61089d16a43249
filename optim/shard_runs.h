#ifndef FULLSHARD_OPTIM_SHARD_RUNS_H_
#define FULLSHARD_OPTIM_SHARD_RUNS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "fullshard/sharding/flat_parameter.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard::internal {

// Elements [begin, end) of this rank's shard of a flat parameter: consecutive
// parameters with one key.
struct ShardRun {
  int64_t begin = 0;
  int64_t end = 0;
  size_t key = 0;

  at::Tensor of(const at::Tensor& shard) const {
    return shard.narrow(0, begin, end - begin);
  }
};

// Splits the shard where the key changes; `keys` has one for each parameter.
// Padding belongs to the parameter before it: its values and gradients are
// zero. A shard that is all padding has no runs.
std::vector<ShardRun> split_shard(const FlatParameter& flat,
                                  const std::vector<size_t>& keys);

// The flat parameters that have gradients, in module order.
std::vector<FlatParameter*> trainable_flats(const ShardedState& state);

// Returns this rank's elements of parameter `index` of `full`, which has the
// parameter's shape: [numel], in memory order; a view where that is possible.
at::Tensor local_part(const FlatParameter& flat, size_t index,
                      const at::Tensor& full);

// Copies them to their place in `shard`, which is split as `flat` is.
void copy_local_part(const FlatParameter& flat, size_t index,
                     const at::Tensor& full, const at::Tensor& shard);

// Returns kAborted if any rank failed and this one did not; else `own`.
// Collective: all ranks. `what` names the call in the message.
absl::Status agree(const ShardedState& state, const absl::Status& own,
                   const char* what);

}  // namespace fullshard::internal

#endif  // FULLSHARD_OPTIM_SHARD_RUNS_H_
