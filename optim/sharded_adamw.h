#ifndef FULLSHARD_OPTIM_SHARDED_ADAMW_H_
#define FULLSHARD_OPTIM_SHARDED_ADAMW_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "fullshard/optim/param_groups.h"
#include "fullshard/sharding/fully_shard.h"

namespace fullshard {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  // Decoupled; applies to the parameters that `decays` selects.
  double weight_decay = 0.01;
  DecayPredicate decays = decays_by_default;
};

// AdamW (Loshchilov and Hutter, 2019, Algorithm 2) on this rank's flat master
// shards, through LibTorch's fused kernel. Clipping by
// ShardedModule::clip_grad_norm is folded into the same pass over memory.
//
// No communication. Keeps the sharded module's state alive.
class ShardedAdamW {
 public:
  ShardedAdamW(const ShardedModule& sharded, const AdamWOptions& options = {});
  ~ShardedAdamW();
  ShardedAdamW(const ShardedAdamW&) = delete;
  ShardedAdamW& operator=(const ShardedAdamW&) = delete;

  // Updates every parameter that has a gradient. Afterwards no unit is
  // unsharded, so that a copy of the old values cannot be used.
  void step();
  // Forgets all gradients; touches no memory.
  void zero_grad();

  double lr() const { return options_.lr; }
  void set_lr(double lr) { options_.lr = lr; }

 private:
  // Consecutive elements of one master shard with equal decay.
  struct Run {
    at::Tensor parameter, gradient, first_moment, second_moment;
    bool decays = false;
  };
  struct FlatState {
    size_t unit = 0;
    size_t flat = 0;
    at::Tensor step;  // 0-dim float.
    std::vector<Run> runs;
  };

  void add_flat(size_t unit, size_t flat);
  void update(const std::vector<FlatState*>& flats, bool decays,
              const std::optional<at::Tensor>& grad_scale);

  const std::shared_ptr<internal::ShardedState> state_;
  AdamWOptions options_;
  std::vector<FlatState> flats_;
};

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_SHARDED_ADAMW_H_
