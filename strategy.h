#ifndef FULLSHARD_STRATEGY_H_
#define FULLSHARD_STRATEGY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/data/batch.h"
#include "fullshard/models/vision_language_model.h"
#include "fullshard/optim/lr_schedule.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/precision/sharded_grad_scaler.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/training_checkpoints.h"
#include "fullshard/training_step.h"

namespace fullshard {

// The settings of a training run. Names and defaults are those of the Prismatic
// family of trainers.
struct StrategyConfig {
  std::string stage = "finetune";
  // full-shard, shard-grad-op (shard inside a host, replicate across hosts),
  // global-full-shard (one shard group over all hosts), no-shard; a prefix
  // "fsdp-" is accepted.
  std::string sharding = "shard-grad-op";

  int64_t epochs = 1;
  std::optional<int64_t> max_steps;  // Wins over epochs.
  int64_t global_batch_size = 128;
  int64_t per_device_batch_size = 16;

  double learning_rate = 2e-5;
  double weight_decay = 0.1;
  double max_grad_norm = 1;  // 0: no clipping.
  std::string lr_scheduler_type = "linear-warmup+cosine-decay";
  double warmup_ratio = 0.03;
  double min_lr_ratio = 0;  // See LrScheduleOptions.
  double lr_decay_ratio = 0.1;
  std::string lr_decay_shape = "cosine";

  bool enable_gradient_checkpointing = true;
  // Of the language model's layers, checkpoint the first and every k-th after.
  int64_t gradient_checkpointing_every = 1;
  // What a checkpointed layer keeps: nothing, or matmuls (outputs of matrix
  // products, convolutions and fused attention).
  std::string gradient_checkpointing_keep = "nothing";
  bool gradient_checkpointing_offload = false;  // Inputs, to host memory.
  bool enable_mixed_precision_training = true;
  std::string mixed_precision_dtype = "bf16";
  // Reduce gradients, and keep buffers, in fp32 instead of the half dtype.
  bool reduce_in_full_precision = false;
  bool keep_low_precision_grads = false;  // See MixedPrecision.
  std::string loss_weighting = "mean";    // Or "tokens".

  // Checkpoints to resume from exactly; see TrainingCheckpoints. Every so many
  // steps, and where the weights are saved; 0: there only.
  int64_t save_interval = 0;
  int64_t keep_last = 2;   // Of them; 0: all.
  bool save_async = true;  // Go on training while one is written.

  uint64_t seed = 7;
};

// Where examples come from.
struct TrainingData {
  int64_t num_examples = 0;
  // Makes a batch of these examples. Called on every rank with its own.
  std::function<VlmBatch(const std::vector<int64_t>& examples, int64_t epoch)>
      collate;
};

// One optimizer step, as it is logged.
struct StepMetrics {
  int64_t step = 0;  // From 1.
  int64_t epoch = 0;
  int64_t total_steps = 0;
  double seconds = 0;  // Of this step.
  StepResult result;
};

struct TrainingHooks {
  // Called after every step, on every rank. An error ends the run.
  std::function<absl::Status(const StepMetrics& metrics)> on_step;
  // Asked before every step; if any rank says true, all stop after it.
  std::function<bool()> stop_requested;
};

// How a run ended.
struct TrainingSummary {
  int64_t global_step = 0;
  int64_t epoch = 0;
  double last_loss = 0;
  bool interrupted = false;
  std::string reason;      // Why it stopped, as a sentence.
  std::string checkpoint;  // Path of the last one; empty without run_dir.
};

// Shards a vision-language model and trains it: the FSDP strategy of the
// Prismatic / OpenVLA family.
//
// Call the model's freeze_backbones(stage) first, then run_setup(), then, if
// wanted, load_checkpoint(), then run_training(). All methods are collective.
class Strategy {
 public:
  Strategy(std::shared_ptr<VisionLanguageModel> model, ProcessGroups groups,
           StrategyConfig config);
  ~Strategy();

  // Wraps, casts, shards and checkpoints the model, counts steps, and makes
  // optimizer and schedule; logs what it did on rank 0.
  //
  // Errors: kInvalidArgument for a setting that cannot be, with the nearest
  // that can; kFailedPrecondition if called twice.
  absl::Status run_setup(const std::string& run_dir, int64_t n_train_examples);

  // Goes on from a checkpoint of run_training, a folder `step-000123`: weights,
  // optimizer, schedule, loss scale, random states and the place in the data.
  // On the same number of ranks the losses are those of a run that was not
  // interrupted, bit for bit. Call after run_setup.
  //
  // Errors: as TrainingCheckpoints::load; kInvalidArgument naming a setting
  // that decides the order of the data and differs.
  absl::Status resume(const std::string& checkpoint);

  // Trains for max_steps or epochs. Saves a checkpoint at the end, also when
  // interrupted, and without max_steps after every epoch: the weights as
  // save_checkpoint, and one to resume from.
  absl::StatusOr<TrainingSummary> run_training(const TrainingData& data,
                                               const TrainingHooks& hooks);

  // Writes <run_dir>/checkpoints/step-..-epoch-..-loss=...pt with the modules
  // that the stage trains (all with only_trainable = false), then points
  // latest-checkpoint.pt at it. Returns the path, on every rank when the file
  // is durable.
  //
  // Errors: kFailedPrecondition before run_setup; those of the file. The
  // previous checkpoint stays intact.
  absl::StatusOr<std::string> save_checkpoint(const std::string& run_dir,
                                              int64_t global_step,
                                              int64_t epoch,
                                              std::optional<double> train_loss,
                                              bool only_trainable = true);

  // Loads the modules that the file holds: a subset of the model's is enough.
  //
  // Errors: those of the file; a missing or unknown key or a wrong shape, by
  // name.
  absl::Status load_checkpoint(const std::string& path);

  double clip_grad_norm();

  // One line per setting, for people.
  std::string setup_summary() const;

  int64_t total_steps() const { return total_steps_; }
  int64_t global_step() const { return progress_.global_step; }
  const StrategyConfig& config() const { return config_; }
  const ProcessGroups& groups() const { return groups_; }
  // Requires: run_setup succeeded.
  FullyShardedModule<VisionLanguageModel>& sharded() { return *sharded_; }

 private:
  absl::Status check_batch_sizes();
  absl::Status checkpoint_activations();
  LrScheduleOptions schedule_options() const;
  absl::StatusOr<ShardOptions> shard_options() const;
  void cast_frozen_vision_tower();
  void count_steps();
  std::vector<VlmBatch> micro_batches(const TrainingData& data,
                                      const std::vector<int64_t>& order,
                                      int64_t begin, int64_t epoch) const;
  // Where training is.
  struct Progress {
    int64_t global_step = 0;
    int64_t epoch = 0;
    int64_t steps_in_epoch = 0;
    double last_loss = 0;
  };
  // Nothing if this step is saved already.
  absl::Status save_progress(bool async);

  const std::shared_ptr<VisionLanguageModel> model_;
  const ProcessGroups groups_;
  const StrategyConfig config_;

  std::string run_dir_;
  int64_t n_train_examples_ = 0;
  int64_t grad_accumulation_steps_ = 1;
  int64_t total_steps_ = 0;
  std::optional<FullyShardedModule<VisionLanguageModel>> sharded_;
  std::unique_ptr<ShardedAdamW> optimizer_;
  std::unique_ptr<ShardedGradScaler> scaler_;  // For fp16.
  std::optional<LrSchedule> schedule_;
  TrainingStepOptions step_options_;
  Progress progress_;
  int64_t saved_step_ = -1;  // Of the last save_progress().
  // Last: what is being saved refers to the model and the optimizer.
  std::unique_ptr<TrainingCheckpoints> checkpoints_;
};

}  // namespace fullshard

#endif  // FULLSHARD_STRATEGY_H_
