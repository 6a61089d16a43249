#ifndef FULLSHARD_TRAINING_CHECKPOINT_LOADER_H_
#define FULLSHARD_TRAINING_CHECKPOINT_LOADER_H_

#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/optim/ema.h"
#include "fullshard/optim/sharded_optimizer.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/training_checkpoint_contents.h"
#include "fullshard/training_checkpoints.h"

namespace fullshard::internal {

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
