#ifndef FULLSHARD_TRAINING_CHECKPOINT_CONTENTS_H_
#define FULLSHARD_TRAINING_CHECKPOINT_CONTENTS_H_

#include <string>
#include <vector>

#include "ATen/ops/view_as_complex.h"
#include "absl/status/status.h"
#include "c10/core/DeviceType.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/io/sharded_checkpoint_writer.h"
#include "fullshard/optim/sharded_optimizer.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/training_checkpoints.h"

namespace fullshard::internal {

// Where tensors are in the nested dicts of a checkpoint.
class TrainingPaths {
 public:
  using Path = std::vector<std::string>;
  static constexpr char kEma[] = "ema";
  static constexpr char kRandomStates[] = "rng";
  static constexpr char kStep[] = "step";

  explicit TrainingPaths(const TrainingCheckpointsOptions& options)
      : model_key_(options.model_key), optimizer_key_(options.optimizer_key) {}
  Path model(const std::string& name) const { return {model_key_, name}; }
  Path optimizer(const std::string& name, const std::string& key) const {
    return {optimizer_key_, "state", name, key};
  }
  static Path ema(const std::string& name) { return {kEma, name}; }
  static Path random_state(int rank, c10::DeviceType device);
  bool is_model(const Path& path) const { return path[0] == model_key_; }
  bool is_optimizer(const Path& path) const {
    return path[0] == optimizer_key_;
  }
  static bool is_ema(const Path& path) { return path[0] == kEma; }

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

// What this rank saves: its parts of parameters, optimizer state and averages,
// its random states, and on rank 0 the tensors that are not sharded; the last
// are copied if `copies_whole_tensors`, for forward writes to buffers. Other
// values are views where they are on the CPU.
std::vector<ShardToSave> collect_contents(
    const ShardedModule& model, const ShardedOptimizer* optimizer,
    const TrainingCheckpointsOptions& options, bool copies_whole_tensors);

// Sets this rank's generators as they were when it saved, if as many ranks did.
// Errors: those of the reader.
absl::Status restore_random_states(const ShardedCheckpointReader& reader,
                                   const ProcessGroups& groups);

}  // namespace fullshard::internal

#endif  // FULLSHARD_TRAINING_CHECKPOINT_CONTENTS_H_
