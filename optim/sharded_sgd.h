#ifndef FULLSHARD_OPTIM_SHARDED_SGD_H_
#define FULLSHARD_OPTIM_SHARDED_SGD_H_

#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "fullshard/optim/param_groups.h"
#include "fullshard/optim/sharded_optimizer.h"
#include "fullshard/sharding/fully_shard.h"

namespace fullshard {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;  // 0: no state at all.
  double dampening = 0;
  // Added to the gradient, for the parameters that `decays` selects.
  double weight_decay = 0;
  DecayPredicate decays = decays_by_default;
  // Needs momentum and no dampening.
  bool nesterov = false;
  bool maximize = false;
  std::vector<ParamGroup> groups = {};
};

// Stochastic gradient descent with momentum (Sutskever et al., 2013) on this
// rank's flat master shards; torch.optim.SGD in exact terms.
//
// State: momentum_buffer, if there is momentum.
class ShardedSGD final : public ShardedOptimizer {
 public:
  // Errors: c10::Error for options that are out of range.
  explicit ShardedSGD(const ShardedModule& sharded,
                      const SgdOptions& options = {});

  bool has_step() const override { return false; }
  OptimizerOptions hyperparameters() const override;

 private:
  void update(Batch& batch,
              const std::optional<at::Tensor>& grad_scale) override;

  const SgdOptions options_;
};

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_SHARDED_SGD_H_
