#ifndef FULLSHARD_OPTIM_SHARDED_ADAMW_H_
#define FULLSHARD_OPTIM_SHARDED_ADAMW_H_

#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "fullshard/optim/param_groups.h"
#include "fullshard/optim/sharded_optimizer.h"
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
  // Keeps the maximum of the second moments: one more tensor of state.
  bool amsgrad = false;
  bool maximize = false;
  std::vector<ParamGroup> groups = {};
};

// AdamW (Loshchilov and Hutter, 2019, Algorithm 2; AMSGrad: Reddi et al., 2018)
// on this rank's flat master shards; torch.optim.AdamW in exact terms.
//
// State: exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
class ShardedAdamW final : public ShardedOptimizer {
 public:
  // Errors: c10::Error for options that are out of range.
  explicit ShardedAdamW(const ShardedModule& sharded,
                        const AdamWOptions& options = {});

  OptimizerOptions hyperparameters() const override;

 private:
  void update(Batch& batch,
              const std::optional<at::Tensor>& grad_scale) override;

  const AdamWOptions options_;
};

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_SHARDED_ADAMW_H_
