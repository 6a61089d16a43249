#ifndef FULLSHARD_TRAINING_CHECKPOINT_LOADER_H_
#define FULLSHARD_TRAINING_CHECKPOINT_LOADER_H_

#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "ATen/ops/view_as_complex.h"
#include "absl/status/status.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/optim/ema.h"
#include "fullshard/optim/sharded_optimizer.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/training_checkpoints.h"

namespace fullshard::internal {

// Where tensors are in the nested dicts of a checkpoint.
class TrainingPaths {
 public:
  explicit TrainingPaths(const TrainingCheckpointsOptions& options)
      : model_key_(options.model_key), optimizer_key_(options.optimizer_key) {}
  std::vector<std::string> model(const std::string& name) const {
    return {model_key_, name};
  }
  std::vector<std::string> optimizer(const std::string& name,
                                     const std::string& key) const {
    return {optimizer_key_, "state", name, key};
  }
  std::vector<std::string> ema(const std::string& name) const {
    return {"ema", name};
  }
  bool is_model(const std::vector<std::string>& path) const {
    return path[0] == model_key_;
  }
  bool is_optimizer(const std::vector<std::string>& path) const {
    return path[0] == optimizer_key_;
  }
  bool is_ema(const std::vector<std::string>& path) const {
    return path[0] == "ema";
  }

 private:
  const std::string model_key_, optimizer_key_;
};

// Optimizers and averages keep complex numbers as pairs of real ones.
inline at::Tensor as_parameter(const LocalShard& local,
                               const at::Tensor& state) {
  return local.values.is_complex()
             ? at::view_as_complex(state.view({state.numel() / 2, 2}))
             : state;
}

// Loads model, optimizer and averages from one checkpoint.
class TrainingCheckpointLoader {
 public:
  TrainingCheckpointLoader(const ShardedCheckpointReader& reader,
                           ShardedModule& model, ShardedOptimizer* optimizer,
                           const TrainingCheckpointsOptions& options);

  // Looks at everything and changes nothing.
  // Errors: as TrainingCheckpoints::load.
  absl::Status check();
  // Collective. Requires: check() returned OK on every rank.
  absl::Status load();

 private:
  using Path = std::vector<std::string>;
  using SavedTensor = ShardedManifest::Tensor;

  // Under any of the parameter's names.
  template <class MakePath>
  const SavedTensor* find(const LocalShard& shard, MakePath make_path) const;
  const SavedTensor* find_model(const LocalShard& shard) const;
  const SavedTensor* find_state(const LocalShard& shard,
                                const std::string& key) const;
  const SavedTensor* find_average(const LocalShard& shard) const;
  absl::Status check_tensor(const SavedTensor* saved, const Path& path,
                            const std::vector<int64_t>& sizes,
                            at::ScalarType dtype);
  absl::Status check_optimizer(const LocalShard& shard);
  absl::Status check_for_unknown() const;
  absl::Status fill(const SavedTensor& saved, const LocalShard& shard,
                    const at::Tensor& values) const;
  absl::Status load_optimizer();

  const ShardedCheckpointReader& reader_;
  ShardedModule& model_;
  ShardedOptimizer* const optimizer_;
  ShardedEma* const ema_;
  const bool cast_dtypes_;
  const TrainingPaths paths_;
  std::unordered_map<std::string, LocalShard> shards_;
  std::vector<LocalOptimizerState> states_;
  std::set<std::string> known_;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_TRAINING_CHECKPOINT_LOADER_H_
