#ifndef FULLSHARD_TRAINING_CHECKPOINTS_H_
#define FULLSHARD_TRAINING_CHECKPOINTS_H_

#include <chrono>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/io/file_system.h"
#include "fullshard/io/sharded_checkpoint_writer.h"
#include "fullshard/optim/ema.h"
#include "fullshard/optim/sharded_optimizer.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/sharding/sharded_state_observer.h"

namespace fullshard {

struct TrainingCheckpointsOptions {
  // After a save, remove all but the last n; 0: keep all.
  int64_t keep_last = 0;
  // Never remove those of steps that are multiples of this; 0: no such steps.
  int64_t keep_every = 0;
  // What the model's and the optimizer's tensors are under; "optimizer" in many
  // checkpoints of Python.
  std::string model_key = "model";
  std::string optimizer_key = "optim";
  // The moving averages of the parameters, saved and loaded too, under "ema";
  // null: none. Outlives the TrainingCheckpoints.
  ShardedEma* ema = nullptr;
  // Convert tensors of another dtype on load, in place of refusing them.
  bool cast_dtypes = false;
  // save_async() returns before its copy is made; forward and backward run
  // beside it. What of this library writes parameters, optimizer state or
  // averages waits for it: step(), reshard() of all units, set_trainable(),
  // summon_full_params(), loads, ShardedEma. Other writers, as torch::optim is,
  // call wait_for_copy() first; a write that did not is found where a version
  // counter shows it in time, and fails the save. No gain on CUDA, where the
  // copy to the host comes first.
  bool copy_in_background = false;
  // How long the ranks wait for each other's files.
  std::chrono::milliseconds timeout{600000};
  FileSystem* file_system = nullptr;  // null: FileSystem::posix()
};

// The sharded checkpoints of a run, to go on from exactly: parameters, buffers,
// the optimizer's state, moving averages, every rank's random state, and what
// the caller adds. Each is a folder `step-000123` that all ranks write
// together, on a file system that they share, and that
// torch.distributed.checkpoint reads too, as {"model": {name: tensor}, "optim":
// {"state": {name: {key: tensor}}, "param_groups": [...]}, "ema": {name:
// tensor}, "rng": {rank: {device: tensor}}}, so that set_optimizer_state_dict
// takes it. `latest` is a link to the last one. Loads at any number of ranks,
// with any mesh, strategy and wrap policy.
//
// Example:
//   TrainingCheckpoints checkpoints(folder, model, &optimizer);
//   checkpoints.save_async(step, {{"epoch", "3"}});
//   ...
//   auto state = checkpoints.load(find_latest_checkpoint(folder).path);
class TrainingCheckpoints : private internal::ShardedStateObserver {
 public:
  using State = std::map<std::string, std::string>;

  // `optimizer` may be null. All outlive the last call of save or load.
  // Errors: c10::Error for keys that are empty, equal or taken ("ema", "rng"),
  // numbers below 0, and an optimizer or average of another model.
  TrainingCheckpoints(std::string folder, ShardedModule& model,
                      ShardedOptimizer* optimizer,
                      const TrainingCheckpointsOptions& options = {});
  // Waits, for up to options.timeout, for a save that is under way; an error is
  // logged.
  ~TrainingCheckpoints() override;
  TrainingCheckpoints(const TrainingCheckpoints&) = delete;
  TrainingCheckpoints& operator=(const TrainingCheckpoints&) = delete;

  // Saves, with `state` of rank 0, and returns the checkpoint's folder, on
  // every rank, when it is durable. A checkpoint of the same step is replaced.
  //
  // Collective. Requires: the average is not swapped in. Errors: those of the
  // files, on every rank, and that of a save that was under way; what was there
  // before stays.
  absl::StatusOr<std::string> save(int64_t step, const State& state);
  // Returns when the model may be changed, or earlier (copy_in_background); a
  // thread writes a copy of this rank's shards, whose memory is kept for the
  // next time. Waits for the save before, and returns its error, first.
  //
  // Collective. Requires and errors: as save(), but for those of the files,
  // which the next save or wait() returns.
  absl::StatusOr<std::string> save_async(int64_t step, const State& state);
  // Returns when the copy that the last save_async() makes is complete. Not
  // collective; from any thread.
  void wait_for_copy();
  // Returns how this rank's part of the save that was under way ended; OK if
  // there was none. Waits for up to options.timeout. Not collective: another
  // rank may have failed later.
  absl::Status wait();

  // Loads a checkpoint; returns its state. Random states are restored if the
  // number of ranks is the same. Waits for a save that is under way; its error
  // is logged.
  //
  // Collective. Errors: those of ShardedCheckpointReader; kInvalidArgument or
  // kNotFound naming a tensor that is missing, unknown to the model, or of
  // another shape or dtype, before anything has changed; a bad checksum may be
  // found when part of the model is loaded.
  absl::StatusOr<State> load(const std::string& checkpoint);

 private:
  struct Save;

  void before_update() override { wait_for_copy(); }
  absl::StatusOr<std::string> start_save(int64_t step, const State& state,
                                         bool async);
  absl::Status prepare(Save& save, bool async);
  void move_to_buffer(Save& save);
  void start_thread(std::shared_ptr<Save> save);
  absl::Status write(const Save& save, const absl::Status& copied) const;
  void remove_old(int64_t step) const;

  const std::string folder_;
  ShardedModule& model_;
  ShardedOptimizer* const optimizer_;
  const TrainingCheckpointsOptions options_;
  FileSystem& file_system_;
  const std::shared_ptr<internal::ShardedState> sharded_state_;
  at::Tensor buffer_;       // Bytes.
  std::string last_saved_;  // The folder of the last save.
  std::shared_future<void> copied_;
  std::thread thread_;
  absl::Status result_;  // Of the thread, once it is joined.
};

}  // namespace fullshard

#endif  // FULLSHARD_TRAINING_CHECKPOINTS_H_
