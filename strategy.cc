#include "fullshard/strategy.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <utility>

#include "ATen/Context.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "fullshard/activation_ckpt/checkpointable.h"
#include "fullshard/core/catch_errors.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/max_over_ranks.h"
#include "fullshard/core/status.h"
#include "fullshard/data/distributed_sampler.h"
#include "fullshard/full_checkpoint.h"
#include "fullshard/io/full_state_dict.h"

namespace fullshard {
Strategy::Strategy(std::shared_ptr<VisionLanguageModel> model,
                   ProcessGroups groups, StrategyConfig config)
    : model_(std::move(model)),
      groups_(std::move(groups)),
      config_(std::move(config)) {}

Strategy::~Strategy() = default;
// --- training

std::vector<VlmBatch> Strategy::micro_batches(const TrainingData& data,
                                              const std::vector<int64_t>& order,
                                              int64_t begin,
                                              int64_t epoch) const {
  const int64_t per_step =
      config_.per_device_batch_size * grad_accumulation_steps_;
  const int64_t end =
      std::min<int64_t>(begin + per_step, static_cast<int64_t>(order.size()));
  std::vector<VlmBatch> batches;
  for (int64_t at = begin; at < end; at += config_.per_device_batch_size) {
    const int64_t stop =
        std::min<int64_t>(at + config_.per_device_batch_size, end);
    batches.push_back(data.collate(
        std::vector<int64_t>(order.begin() + at, order.begin() + stop), epoch));
  }
  return batches;
}

absl::StatusOr<TrainingSummary> Strategy::run_training(
    const TrainingData& data, const TrainingHooks& hooks) {
  if (!sharded_.has_value()) {
    return absl::FailedPreconditionError("run_training before run_setup");
  }
  const DistributedSampler sampler(data.num_examples, groups_.world_size(),
                                   groups_.rank(), config_.seed);
  const int64_t per_step =
      config_.per_device_batch_size * grad_accumulation_steps_;
  TrainingSummary summary;
  StepMetrics metrics;
  metrics.total_steps = total_steps_;
  if (!run_dir_.empty()) {
    TrainingCheckpointsOptions options;
    options.keep_last = config_.keep_last;
    options.copy_in_background = true;  // All that changes weights is ours.
    checkpoints_ = std::make_unique<TrainingCheckpoints>(
        run_dir_ + "/checkpoints", *sharded_, optimizer_.get(), options);
  }
  auto save = [&]() -> absl::Status {
    if (run_dir_.empty()) return absl::OkStatus();
    FS_ASSIGN_OR_RETURN(summary.checkpoint,
                        save_checkpoint(run_dir_, progress_.global_step,
                                        progress_.epoch, progress_.last_loss));
    return save_progress(config_.save_async);
  };
  bool saved = progress_.global_step > 0;  // Nothing is new yet.
  while (progress_.global_step < total_steps_ && !summary.interrupted) {
    const std::vector<int64_t> order = sampler.indices(progress_.epoch);
    for (int64_t at = progress_.steps_in_epoch * per_step;
         at < static_cast<int64_t>(order.size()) &&
         progress_.global_step < total_steps_ && !summary.interrupted;
         at += per_step) {
      const auto start = std::chrono::steady_clock::now();
      absl::Status status = catch_errors("training", [&]() -> absl::Status {
        metrics.result =
            training_step(*sharded_, *optimizer_, *schedule_, step_options_,
                          progress_.global_step,
                          micro_batches(data, order, at, progress_.epoch),
                          hooks.stop_requested && hooks.stop_requested());
        return absl::OkStatus();
      });
      FS_RETURN_IF_ERROR(status);
      metrics.seconds = std::chrono::duration<double>(
                            std::chrono::steady_clock::now() - start)
                            .count();
      metrics.step = ++progress_.global_step;
      metrics.epoch = progress_.epoch;
      ++progress_.steps_in_epoch;
      progress_.last_loss = metrics.result.loss;
      summary.interrupted = metrics.result.stop;
      saved = false;
      if (hooks.on_step) FS_RETURN_IF_ERROR(hooks.on_step(metrics));
      const bool due = checkpoints_ != nullptr && config_.save_interval > 0 &&
                       progress_.global_step % config_.save_interval == 0;
      if (due) FS_RETURN_IF_ERROR(save_progress(config_.save_async));
    }
    if (summary.interrupted || progress_.global_step >= total_steps_) break;
    if (!config_.max_steps.has_value() && !saved) {
      FS_RETURN_IF_ERROR(save());
      saved = true;
    }
    ++progress_.epoch;
    progress_.steps_in_epoch = 0;
  }
  if (!saved) FS_RETURN_IF_ERROR(save());
  if (checkpoints_ != nullptr) {
    FS_RETURN_IF_ERROR(agree(groups_, checkpoints_->wait(), "last checkpoint"));
  }
  summary.global_step = progress_.global_step;
  summary.epoch = progress_.epoch;
  summary.last_loss = progress_.last_loss;
  summary.reason = summary.interrupted
                       ? absl::StrCat("interrupted at step ",
                                      summary.global_step, " of ", total_steps_)
                   : config_.max_steps.has_value()
                       ? absl::StrCat("reached max_steps = ", total_steps_)
                       : absl::StrCat("finished ", config_.epochs, " epochs, ",
                                      total_steps_, " steps");
  return summary;
}

double Strategy::clip_grad_norm() {
  TORCH_CHECK(sharded_.has_value(), "clip_grad_norm before run_setup");
  return sharded_->clip_grad_norm(config_.max_grad_norm);
}

// --- checkpoints

absl::StatusOr<std::string> Strategy::save_checkpoint(
    const std::string& run_dir, int64_t global_step, int64_t epoch,
    std::optional<double> train_loss, bool only_trainable) {
  if (!sharded_.has_value()) {
    return absl::FailedPreconditionError("save_checkpoint before run_setup");
  }
  const std::filesystem::path folder =
      std::filesystem::path(run_dir) / "checkpoints";
  const std::string path =
      (folder / checkpoint_name(global_step, epoch, train_loss)).string();
  absl::Status status;
  if (groups_.rank() == 0) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) {
      status = absl::UnavailableError(absl::StrCat(
          "cannot create ", folder.string(), ": ", error.message()));
    }
  }
  FS_RETURN_IF_ERROR(agree(groups_, status, path));
  FullCheckpointOptions options;
  options.all_module_keys = model_->all_module_keys();
  options.module_keys = only_trainable ? model_->trainable_module_keys()
                                       : options.all_module_keys;
  FS_RETURN_IF_ERROR(save_full_checkpoint(*sharded_, path, options));
  if (groups_.rank() == 0) {
    const absl::Status linked = update_latest(path);
    if (!linked.ok()) {
      log_warning(absl::StrCat(path,
                               " is saved, but latest-checkpoint.pt "
                               "does not point at it: ",
                               linked.message()));
    }
  }
  return path;
}

absl::Status Strategy::load_checkpoint(const std::string& path) {
  if (!sharded_.has_value()) {
    return absl::FailedPreconditionError("load_checkpoint before run_setup");
  }
  FS_ASSIGN_OR_RETURN(const std::string file, resolve_checkpoint(path));
  FS_ASSIGN_OR_RETURN(auto reader, FullStateDictReader::open(file));
  const std::vector<std::string> known = model_->all_module_keys();
  std::vector<std::string> modules = reader->module_keys();
  for (const std::string& key : modules) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, ": the model has no module '", key, "'; it has ",
                       absl::StrJoin(known, ", ")));
    }
  }
  if (modules.empty()) modules = known;  // A flat dict names everything.
  auto selected = [&](const std::string& name) {
    return std::any_of(modules.begin(), modules.end(), [&](const auto& key) {
      return absl::StartsWith(name, key + ".");
    });
  };
  const std::vector<std::string> names = sharded_->state_dict_names();
  for (const std::string& name : reader->names()) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, ": unexpected key '", name, "'"));
    }
  }
  LoadOptions options;
  options.names = selected;
  options.cast_dtypes = true;  // As Module.load_state_dict does.
  FS_RETURN_IF_ERROR(annotate(
      load_full_checkpoint(
          *sharded_,
          [&](const std::string& name) { return reader->tensor(name); },
          options),
      file));
  if (groups_.rank() == 0) {
    log_info(
        absl::StrCat("loaded ", absl::StrJoin(modules, ", "), " from ", file));
  }
  return absl::OkStatus();
}

}  // namespace fullshard
