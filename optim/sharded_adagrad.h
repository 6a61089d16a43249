#ifndef FULLSHARD_OPTIM_SHARDED_ADAGRAD_H_
#define FULLSHARD_OPTIM_SHARDED_ADAGRAD_H_

#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "fullshard/optim/param_groups.h"
#include "fullshard/optim/sharded_optimizer.h"
#include "fullshard/sharding/fully_shard.h"

namespace fullshard {

struct AdagradOptions {
  double lr = 1e-2;
  // Step k, from 0, uses lr / (1 + k lr_decay).
  double lr_decay = 0;
  double eps = 1e-10;
  double initial_accumulator_value = 0;
  // Added to the gradient, for the parameters that `decays` selects.
  double weight_decay = 0;
  DecayPredicate decays = decays_by_default;
  bool maximize = false;
  std::vector<ParamGroup> groups = {};
};

// Adagrad (Duchi et al., 2011) on this rank's flat master shards;
// torch.optim.Adagrad in exact terms.
//
// State: sum, also of parameters that never had a gradient.
class ShardedAdagrad final : public ShardedOptimizer {
 public:
  // Errors: c10::Error for options that are out of range.
  explicit ShardedAdagrad(const ShardedModule& sharded,
                          const AdagradOptions& options = {});

  bool has_state_at_step_0() const override { return true; }
  OptimizerOptions hyperparameters() const override;

 private:
  void update(Batch& batch,
              const std::optional<at::Tensor>& grad_scale) override;

  const AdagradOptions options_;
};

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_SHARDED_ADAGRAD_H_
