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
#include "fullshard/core/logging.h"
#include "fullshard/core/status.h"
#include "fullshard/data/distributed_sampler.h"
#include "fullshard/io/full_state_dict.h"

namespace fullshard {
namespace {

absl::StatusOr<ShardingStrategy> parse_sharding(const std::string& id) {
  const absl::string_view name = absl::StripPrefix(id, "fsdp-");
  if (name == "full-shard") return ShardingStrategy::kHybridShard;
  if (name == "shard-grad-op") return ShardingStrategy::kHybridShardZero2;
  if (name == "global-full-shard") return ShardingStrategy::kFullShard;
  if (name == "no-shard") return ShardingStrategy::kNoShard;
  return absl::InvalidArgumentError(absl::StrCat(
      "sharding: expected full-shard, shard-grad-op, global-full-shard or "
      "no-shard; got '",
      id, "'"));
}

absl::StatusOr<std::optional<at::ScalarType>> parse_half_dtype(
    const StrategyConfig& config) {
  if (!config.enable_mixed_precision_training) {
    return std::optional<at::ScalarType>();
  }
  if (config.mixed_precision_dtype == "bf16") {
    return std::optional<at::ScalarType>(at::kBFloat16);
  }
  if (config.mixed_precision_dtype == "fp16") {
    return std::optional<at::ScalarType>(at::kHalf);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("mixed_precision_dtype: expected bf16, fp16, or "
                   "enable_mixed_precision_training=false for fp32; got '",
                   config.mixed_precision_dtype, "'"));
}

absl::StatusOr<LossWeighting> parse_weighting(const std::string& name) {
  if (name == "mean") return LossWeighting::kMean;
  if (name == "tokens") return LossWeighting::kTokens;
  return absl::InvalidArgumentError(absl::StrCat(
      "loss_weighting: expected mean or tokens; got '", name, "'"));
}

bool stage_trains_vision(const std::string& stage) {
  return stage == "full-finetune" || stage == "vla-full-train" ||
         stage == "vla-sandwich-train";
}

std::string mebibytes(int64_t num_bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(num_bytes) / 1048576);
}

// Turns what LibTorch throws into a status, in one place.
template <class F>
auto guarded(const char* where, F f) -> decltype(f()) {
  try {
    return f();
  } catch (const c10::Error& error) {
    return absl::InternalError(
        absl::StrCat(where, ": ", error.what_without_backtrace()));
  }
}

}  // namespace

Strategy::Strategy(std::shared_ptr<VisionLanguageModel> model,
                   ProcessGroups groups, StrategyConfig config)
    : model_(std::move(model)),
      groups_(std::move(groups)),
      config_(std::move(config)) {}

Strategy::~Strategy() = default;

// --- set-up

absl::Status Strategy::run_setup(const std::string& run_dir,
                                 int64_t n_train_examples) {
  if (sharded_.has_value()) {
    return absl::FailedPreconditionError("run_setup was called twice");
  }
  run_dir_ = run_dir;
  n_train_examples_ = n_train_examples;
  FS_RETURN_IF_ERROR(check_batch_sizes());
  FS_ASSIGN_OR_RETURN(const ShardOptions options, shard_options());
  FS_ASSIGN_OR_RETURN(step_options_.loss_weighting,
                      parse_weighting(config_.loss_weighting));
  FS_ASSIGN_OR_RETURN(step_options_.autocast_dtype, parse_half_dtype(config_));
  step_options_.learning_rate = config_.learning_rate;
  step_options_.max_grad_norm = config_.max_grad_norm;
  cast_frozen_vision_tower();

  FS_ASSIGN_OR_RETURN(sharded_, fully_shard(model_, groups_, options));
  if (config_.enable_gradient_checkpointing) {
    const ModuleList layers = model_->checkpoint_modules();
    FS_RETURN_IF_ERROR(
        apply_activation_checkpointing(*model_, [&](const std::string&,
                                                    torch::nn::Module& module) {
          return std::any_of(
              layers.begin(), layers.end(),
              [&](const auto& layer) { return layer.get() == &module; });
        }).status());
  }
  FS_RETURN_IF_ERROR(guarded("run_setup", [&]() -> absl::Status {
    groups_.world()->barrier()->wait();
    return absl::OkStatus();
  }));

  count_steps();
  AdamWOptions adamw;
  adamw.lr = config_.learning_rate;
  adamw.weight_decay = config_.weight_decay;
  optimizer_ = std::make_unique<ShardedAdamW>(*sharded_, adamw);
  if (step_options_.autocast_dtype == at::kHalf) {
    scaler_ = std::make_unique<ShardedGradScaler>(*sharded_);
    step_options_.scaler = scaler_.get();
  }
  FS_ASSIGN_OR_RETURN(
      schedule_, LrSchedule::create(config_.lr_scheduler_type, total_steps_,
                                    config_.warmup_ratio));
  if (groups_.rank() == 0) log_info(setup_summary());
  return absl::OkStatus();
}

absl::Status Strategy::check_batch_sizes() {
  const int64_t global = config_.global_batch_size;
  const int64_t unit = config_.per_device_batch_size * groups_.world_size();
  if (config_.per_device_batch_size < 1 || global < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "batch sizes: expected 1 or more, got global_batch_size ", global,
        ", per_device_batch_size ", config_.per_device_batch_size));
  }
  if (global % unit != 0) {
    const int64_t below = global / unit * unit;
    return absl::InvalidArgumentError(absl::StrCat(
        "global_batch_size: expected a multiple of per_device_batch_size x "
        "ranks = ",
        config_.per_device_batch_size, " x ", groups_.world_size(), " = ", unit,
        ", got ", global, "; the nearest ",
        below > 0 ? absl::StrCat("are ", below, " and ", below + unit)
                  : absl::StrCat("is ", unit)));
  }
  if (n_train_examples_ < 1) {
    return absl::InvalidArgumentError("the training data has no examples");
  }
  grad_accumulation_steps_ = global / unit;
  return absl::OkStatus();
}

absl::StatusOr<ShardOptions> Strategy::shard_options() const {
  ShardOptions options;
  FS_ASSIGN_OR_RETURN(options.strategy, parse_sharding(config_.sharding));
  FS_ASSIGN_OR_RETURN(const std::optional<at::ScalarType> half,
                      parse_half_dtype(config_));
  if (half.has_value()) {
    options.mixed_precision.param_dtype = half;
    const at::ScalarType reduced =
        config_.reduce_in_full_precision ? at::kFloat : *half;
    options.mixed_precision.reduce_dtype = reduced;
    options.mixed_precision.buffer_dtype = reduced;
  }
  options.wrap_policy = module_list(model_->unit_modules());
  // One seed initialises all ranks alike; this makes sure of it.
  options.sync_module_states = true;
  return options;
}

void Strategy::cast_frozen_vision_tower() {
  if (!config_.enable_mixed_precision_training || !model_->vision_frozen() ||
      stage_trains_vision(config_.stage)) {
    return;
  }
  const at::ScalarType half = *parse_half_dtype(config_).value();
  model_->vision_tower()->to(half);
  if (groups_.rank() == 0) {
    log_info(absl::StrCat("the frozen vision tower is stored as ",
                          at::toString(half)));
  }
}

void Strategy::count_steps() {
  const int64_t global = config_.global_batch_size;
  const int64_t per_epoch = (n_train_examples_ + global - 1) / global;
  total_steps_ = config_.max_steps.value_or(per_epoch * config_.epochs);
}

std::string Strategy::setup_summary() const {
  int64_t numel = 0, trainable = 0, sharded = 0, largest = 0, second = 0;
  for (const UnitInfo& unit : sharded_->units()) {
    numel += unit.numel;
    if (unit.trainable) trainable += unit.numel;
    sharded += unit.sharded_bytes * (unit.trainable ? 4 : 1);
    if (unit.unsharded_bytes > largest) {
      second = std::exchange(largest, unit.unsharded_bytes);
    } else {
      second = std::max(second, unit.unsharded_bytes);
    }
  }
  const int64_t global = config_.global_batch_size;
  const int64_t rounded = (n_train_examples_ + global - 1) / global * global;
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"stage", config_.stage},
      {"sharding",
       absl::StrCat(config_.sharding, ", ", sharded_->units().size(),
                    " units, ", groups_.world_size(), " ranks, ",
                    groups_.backend())},
      {"parameters", absl::StrFormat("%.3f M, %.3f M trainable",
                                     static_cast<double>(numel) / 1e6,
                                     static_cast<double>(trainable) / 1e6)},
      {"batch size",
       absl::StrCat(global, " = ", config_.per_device_batch_size,
                    " per rank x ", groups_.world_size(), " ranks x ",
                    grad_accumulation_steps_, " accumulation")},
      {"precision",
       config_.enable_mixed_precision_training
           ? absl::StrCat(config_.mixed_precision_dtype, ", reduced in ",
                          config_.reduce_in_full_precision
                              ? "fp32"
                              : config_.mixed_precision_dtype)
           : "fp32"},
      {"activation checkpointing",
       config_.enable_gradient_checkpointing ? "on" : "off"},
      {"learning rate",
       absl::StrCat(config_.learning_rate, ", ", config_.lr_scheduler_type,
                    ", ", schedule_->warmup_steps(), " warmup steps (ratio ",
                    config_.warmup_ratio, ")")},
      {"weight decay", absl::StrCat(config_.weight_decay)},
      {"gradient norm", config_.max_grad_norm > 0
                            ? absl::StrCat("clipped at ", config_.max_grad_norm)
                            : "not clipped"},
      {"loss weighting", config_.loss_weighting},
      {"dataset", absl::StrCat(n_train_examples_, " examples (", rounded,
                               " in whole batches)")},
      {"steps",
       absl::StrCat(total_steps_,
                    config_.max_steps.has_value()
                        ? " (max_steps)"
                        : absl::StrCat(" (", config_.epochs, " epochs)"))},
      {"memory per rank",
       absl::StrCat(mebibytes(sharded + largest + second), " and activations")},
      {"run directory", run_dir_.empty() ? "none" : run_dir_},
  };
  std::string table = "Training setup";
  for (const auto& [name, value] : rows) {
    absl::StrAppendFormat(&table, "\n  %-25s %s", name, value);
  }
  return table;
}

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
  auto save = [&]() -> absl::Status {
    if (run_dir_.empty()) return absl::OkStatus();
    FS_ASSIGN_OR_RETURN(summary.checkpoint,
                        save_checkpoint(run_dir_, summary.global_step,
                                        summary.epoch, summary.last_loss));
    return absl::OkStatus();
  };
  bool saved = false;
  while (summary.global_step < total_steps_ && !summary.interrupted) {
    const std::vector<int64_t> order = sampler.indices(summary.epoch);
    for (int64_t at = 0;
         at < static_cast<int64_t>(order.size()) &&
         summary.global_step < total_steps_ && !summary.interrupted;
         at += per_step) {
      const auto start = std::chrono::steady_clock::now();
      absl::Status status = guarded("training", [&]() -> absl::Status {
        metrics.result = training_step(
            *sharded_, *optimizer_, *schedule_, step_options_,
            summary.global_step, micro_batches(data, order, at, summary.epoch),
            hooks.stop_requested && hooks.stop_requested());
        return absl::OkStatus();
      });
      FS_RETURN_IF_ERROR(status);
      metrics.seconds = std::chrono::duration<double>(
                            std::chrono::steady_clock::now() - start)
                            .count();
      metrics.step = ++summary.global_step;
      metrics.epoch = summary.epoch;
      summary.last_loss = metrics.result.loss;
      summary.interrupted = metrics.result.stop;
      saved = false;
      if (hooks.on_step) FS_RETURN_IF_ERROR(hooks.on_step(metrics));
    }
    if (summary.interrupted || summary.global_step >= total_steps_) break;
    if (!config_.max_steps.has_value()) {
      FS_RETURN_IF_ERROR(save());
      saved = true;
    }
    ++summary.epoch;
  }
  if (!saved) FS_RETURN_IF_ERROR(save());
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
  const absl::Status written = write_checkpoint(path, only_trainable);
  FS_RETURN_IF_ERROR(status);
  FS_RETURN_IF_ERROR(written);
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

absl::Status Strategy::write_checkpoint(const std::string& path,
                                        bool only_trainable) {
  FullStateDictOptions options;
  options.all_module_keys = model_->all_module_keys();
  options.module_keys = only_trainable ? model_->trainable_module_keys()
                                       : options.all_module_keys;
  options.names = sharded_->state_dict_names();
  std::unique_ptr<FullStateDictWriter> writer;
  absl::Status opened;
  if (groups_.rank() == 0) {
    auto created = FullStateDictWriter::create(path, options);
    opened = created.status();
    if (created.ok()) writer = std::move(created).value();
  }
  // Rank 0's errors reach the others at the end: no rank may leave the gathers.
  return sharded_->full_state_dict(
      [&](const std::string& name, const at::Tensor& tensor) {
        FS_RETURN_IF_ERROR(opened);
        return writer->add(name, tensor.contiguous());
      },
      /*all_ranks=*/false,
      [&] { return opened.ok() ? writer->commit() : opened; });
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
      sharded_->load_full_state_dict(
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
