#include "fullshard/optim/sharded_sgd.h"

#include "ATen/ops/_fused_sgd.h"

namespace fullshard {

ShardedSGD::ShardedSGD(const ShardedModule& sharded, const SgdOptions& options)
    : ShardedOptimizer(
          sharded,
          {options.lr, options.weight_decay, options.decays, options.groups,
           options.momentum != 0 ? std::vector<StateTensor>{{"momentum_buffer"}}
                                 : std::vector<StateTensor>()}),
      options_(options) {
  TORCH_CHECK(options.momentum >= 0,
              "SGD: expected momentum of 0 or more, got ", options.momentum);
  TORCH_CHECK(
      !options.nesterov || (options.momentum > 0 && options.dampening == 0),
      "SGD: nesterov needs momentum above 0 and dampening 0, got ",
      options.momentum, " and ", options.dampening);
}

void ShardedSGD::update(Batch& batch,
                        const std::optional<at::Tensor>& grad_scale) {
  at::_fused_sgd_(
      batch.parameters, batch.gradients,
      batch.state.empty() ? std::vector<at::Tensor>() : batch.state[0],
      batch.group->weight_decay, options_.momentum, batch.group->lr,
      options_.dampening, options_.nesterov, options_.maximize,
      batch.first_update, grad_scale);
}

OptimizerOptions ShardedSGD::hyperparameters() const {
  return {{"momentum", options_.momentum}, {"dampening", options_.dampening},
          {"nesterov", options_.nesterov}, {"maximize", options_.maximize},
          {"foreach", std::monostate()},   {"differentiable", false},
          {"fused", std::monostate()}};
}

}  // namespace fullshard
