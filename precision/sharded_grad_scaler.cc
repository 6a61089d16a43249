#include "fullshard/precision/sharded_grad_scaler.h"

#include <cmath>
#include <limits>

#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/max_over_ranks.h"
#include "fullshard/sharding/gradient_norm.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard {
namespace {

bool all_finite(const at::Tensor& gradient) {
  return std::isfinite(internal::norm_by_rows(
      gradient.reshape(-1), std::numeric_limits<double>::infinity()));
}

}  // namespace

ShardedGradScaler::ShardedGradScaler(const ShardedModule& sharded,
                                     const GradScalerOptions& options)
    : state_(sharded.state()), options_(options), scale_(options.init_scale) {
  TORCH_CHECK(options.init_scale > 0,
              "GradScaler: expected an init_scale above 0, got ",
              options.init_scale);
  TORCH_CHECK(options.growth_factor > 1,
              "GradScaler: expected a growth_factor above 1, got ",
              options.growth_factor);
  TORCH_CHECK(options.backoff_factor > 0 && options.backoff_factor < 1,
              "GradScaler: expected a backoff_factor between 0 and 1, got ",
              options.backoff_factor);
  TORCH_CHECK(options.growth_interval > 0,
              "GradScaler: expected a growth_interval above 0, got ",
              options.growth_interval);
}

at::Tensor ShardedGradScaler::scale(const at::Tensor& loss) const {
  return options_.enabled ? loss * scale_ : loss;
}

bool ShardedGradScaler::any_rank_has_infinity() const {
  bool found = false;
  for (const auto& unit : state_->units()) {
    for (const auto& flat : unit->flats) {
      if (!flat->placement().trainable || !flat->has_gradient()) continue;
      found = found || !all_finite(flat->gradient_shard());
    }
  }
  for (const at::Tensor& parameter : state_->ignored_parameters()) {
    const at::Tensor& gradient = parameter.grad();
    found = found || (gradient.defined() && !all_finite(gradient));
  }
  return max_over_ranks(state_->groups(), found ? 1 : 0,
                        "all_reduce of found_inf") != 0;
}

void ShardedGradScaler::unscale() {
  if (!options_.enabled) return;
  TORCH_CHECK(!unscaled_,
              "GradScaler: unscale() was called already since the last "
              "update(), or step() was");
  TORCH_CHECK(!state_->steps_in_backward(),
              "GradScaler: with the optimizer in backward, gradients are used "
              "before they can be checked");
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  found_infinity_ = any_rank_has_infinity();
  unscaled_ = true;
  state_->pending_gradient_scale /= scale_;
  if (!state_->optimizer_applies_scale) state_->apply_pending_scale();
  for (const at::Tensor& parameter : state_->ignored_parameters()) {
    if (parameter.grad().defined()) parameter.mutable_grad().div_(scale_);
  }
}

bool ShardedGradScaler::step(ShardedOptimizer& optimizer) {
  return step([&] { optimizer.step(); });
}

bool ShardedGradScaler::step(const std::function<void()>& optimizer_step) {
  if (!options_.enabled) {
    optimizer_step();
    return true;
  }
  TORCH_CHECK(!stepped_,
              "GradScaler: step() was called already since the last update()");
  if (!unscaled_) unscale();
  stepped_ = true;
  if (!found_infinity_) optimizer_step();
  return !found_infinity_;
}

void ShardedGradScaler::update() {
  if (!options_.enabled) return;
  TORCH_CHECK(unscaled_,
              "GradScaler: update() without unscale() or step() before it: no "
              "gradient was checked");
  if (found_infinity_) {
    scale_ *= options_.backoff_factor;
    growth_tracker_ = 0;
  } else if (++growth_tracker_ == options_.growth_interval) {
    scale_ *= options_.growth_factor;
    growth_tracker_ = 0;
  }
  unscaled_ = stepped_ = found_infinity_ = false;
}

void ShardedGradScaler::load_state(const State& state) {
  TORCH_CHECK(state.scale > 0, "GradScaler: expected a scale above 0, got ",
              state.scale);
  scale_ = state.scale;
  growth_tracker_ = state.growth_tracker;
}

}  // namespace fullshard
