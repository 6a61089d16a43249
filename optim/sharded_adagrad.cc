#include "fullshard/optim/sharded_adagrad.h"

#include "ATen/ops/_fused_adagrad.h"

namespace fullshard {

ShardedAdagrad::ShardedAdagrad(const ShardedModule& sharded,
                               const AdagradOptions& options)
    : ShardedOptimizer(sharded, {options.lr,
                                 options.weight_decay,
                                 options.decays,
                                 options.groups,
                                 {{"sum", options.initial_accumulator_value}}}),
      options_(options) {
  TORCH_CHECK(options.lr_decay >= 0 && options.eps >= 0 &&
                  options.initial_accumulator_value >= 0,
              "Adagrad: expected lr_decay, eps and initial_accumulator_value "
              "of 0 or more, got ",
              options.lr_decay, ", ", options.eps, " and ",
              options.initial_accumulator_value);
}

void ShardedAdagrad::update(Batch& batch,
                            const std::optional<at::Tensor>& grad_scale) {
  at::_fused_adagrad_(batch.parameters, batch.gradients, batch.state[0],
                      batch.steps, batch.group->lr, options_.lr_decay,
                      batch.group->weight_decay, options_.eps,
                      options_.maximize, grad_scale);
}

OptimizerOptions ShardedAdagrad::hyperparameters() const {
  return {{"lr_decay", options_.lr_decay},
          {"eps", options_.eps},
          {"initial_accumulator_value", options_.initial_accumulator_value},
          {"foreach", std::monostate()},
          {"maximize", options_.maximize},
          {"differentiable", false},
          {"fused", std::monostate()}};
}

}  // namespace fullshard
