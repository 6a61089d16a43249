#ifndef FULLSHARD_PRECISION_SHARDED_GRAD_SCALER_H_
#define FULLSHARD_PRECISION_SHARDED_GRAD_SCALER_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "ATen/core/Tensor.h"
#include "fullshard/optim/sharded_optimizer.h"
#include "fullshard/sharding/fully_shard.h"

namespace fullshard {

// Defaults and rule are those of torch.amp.GradScaler.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval =
      2000;             // Good steps in a row before the scale grows.
  bool enabled = true;  // Off: every call does what it would without.
};

// Loss scaling for fp16: gradients are computed from a loss times `scale`, so
// that small ones do not vanish, and count divided by it. A step whose
// gradients have an infinity or NaN on any rank is left out on all ranks, and
// the scale shrinks.
//
// The division is folded into the optimizer's own pass over memory.
//
// Example:
//   scaler.scale(loss).backward();
//   scaler.unscale();             // Only if something looks at gradients:
//   model.clip_grad_norm(1.0);    // clipping, or the user.
//   scaler.step(optimizer);
//   scaler.update();
//   optimizer.zero_grad();
class ShardedGradScaler {
 public:
  // Errors: c10::Error for options that are out of range.
  explicit ShardedGradScaler(const ShardedModule& sharded,
                             const GradScalerOptions& options = {});

  at::Tensor scale(const at::Tensor& loss) const;
  double get_scale() const { return options_.enabled ? scale_ : 1; }

  // Looks for infinities and NaN on all ranks, and makes the gradients count
  // divided by the scale. Once between two update()s.
  //
  // Collective, also for ranks whose shards are empty: one small all-reduce.
  // Errors: c10::Error if called twice, or with the optimizer in backward.
  void unscale();

  // Steps unless a gradient was infinite or NaN; returns whether it did. Calls
  // unscale() first if that was not done. The second form is for optimizers of
  // torch::optim over local parameters, and for more than one optimizer.
  //
  // Collective. Errors: c10::Error if called twice before update().
  bool step(ShardedOptimizer& optimizer);
  bool step(const std::function<void()>& optimizer_step);

  // Shrinks the scale if the last step was left out, and grows it after
  // growth_interval good ones.
  //
  // Errors: c10::Error if neither unscale() nor step() was called since the
  // last update(): nothing was checked.
  void update();

  // --- to save, and to go on from
  struct State {
    double scale = 0;
    int64_t growth_tracker = 0;  // Good steps since the scale changed.
  };
  State state() const { return {scale_, growth_tracker_}; }
  // Errors: c10::Error for a scale that is not above 0.
  void load_state(const State& state);

 private:
  bool any_rank_has_infinity() const;

  const std::shared_ptr<internal::ShardedState> state_;
  const GradScalerOptions options_;
  double scale_;
  int64_t growth_tracker_ = 0;
  // Since the last update():
  bool unscaled_ = false;
  bool stepped_ = false;
  bool found_infinity_ = false;
};

}  // namespace fullshard

#endif  // FULLSHARD_PRECISION_SHARDED_GRAD_SCALER_H_
