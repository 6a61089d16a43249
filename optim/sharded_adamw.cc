#include "fullshard/optim/sharded_adamw.h"

#include <utility>

#include "ATen/ops/_fused_adamw.h"

namespace fullshard {

ShardedAdamW::ShardedAdamW(const ShardedModule& sharded,
                           const AdamWOptions& options)
    : ShardedOptimizer(
          sharded,
          {options.lr, options.weight_decay, options.decays, options.groups,
           options.amsgrad
               ? std::vector<StateTensor>{{"exp_avg"},
                                          {"exp_avg_sq"},
                                          {"max_exp_avg_sq"}}
               : std::vector<StateTensor>{{"exp_avg"}, {"exp_avg_sq"}}}),
      options_(options) {
  const auto is_beta = [](double beta) { return beta >= 0 && beta < 1; };
  TORCH_CHECK(is_beta(options.beta1) && is_beta(options.beta2),
              "AdamW: expected betas from 0 to below 1, got ", options.beta1,
              " and ", options.beta2);
  TORCH_CHECK(options.eps >= 0, "AdamW: expected eps of 0 or more, got ",
              options.eps);
}

void ShardedAdamW::update(Batch& batch,
                          const std::optional<at::Tensor>& grad_scale) {
  at::_fused_adamw_(
      batch.parameters, batch.gradients, batch.state[0], batch.state[1],
      options_.amsgrad ? batch.state[2] : std::vector<at::Tensor>(),
      batch.steps, batch.group->lr, options_.beta1, options_.beta2,
      batch.group->weight_decay, options_.eps, options_.amsgrad,
      options_.maximize, grad_scale);
}

OptimizerOptions ShardedAdamW::hyperparameters() const {
  return {{"betas", std::make_pair(options_.beta1, options_.beta2)},
          {"eps", options_.eps},
          {"amsgrad", options_.amsgrad},
          {"maximize", options_.maximize},
          {"foreach", std::monostate()},
          {"capturable", false},
          {"differentiable", false},
          {"fused", std::monostate()},
          {"decoupled_weight_decay", true}};
}

}  // namespace fullshard
