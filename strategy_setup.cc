#include <algorithm>
#include <utility>

#include "ATen/Context.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "fullshard/activation_ckpt/checkpointable.h"
#include "fullshard/core/catch_errors.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/status.h"
#include "fullshard/strategy.h"

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

std::string describe_checkpointing(const StrategyConfig& config) {
  if (!config.enable_gradient_checkpointing) return "off";
  std::string text = "on";
  if (config.gradient_checkpointing_every > 1) {
    absl::StrAppend(&text, ", every ", config.gradient_checkpointing_every,
                    " layers");
  }
  if (config.gradient_checkpointing_keep != "nothing") {
    absl::StrAppend(&text, ", keeps ", config.gradient_checkpointing_keep);
  }
  if (config.gradient_checkpointing_offload) {
    absl::StrAppend(&text, ", inputs offloaded");
  }
  return text;
}

}  // namespace

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
    FS_RETURN_IF_ERROR(checkpoint_activations());
  }
  FS_RETURN_IF_ERROR(catch_errors("run_setup", [&] {
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
  FS_ASSIGN_OR_RETURN(schedule_, LrSchedule::create(schedule_options()));
  if (groups_.rank() == 0) log_info(setup_summary());
  return absl::OkStatus();
}

LrScheduleOptions Strategy::schedule_options() const {
  LrScheduleOptions options;
  options.type = config_.lr_scheduler_type;
  options.total_steps = total_steps_;
  options.warmup_ratio = config_.warmup_ratio;
  options.min_lr_ratio = config_.min_lr_ratio;
  options.decay_ratio = config_.lr_decay_ratio;
  options.decay_shape = config_.lr_decay_shape;
  return options;
}

absl::Status Strategy::checkpoint_activations() {
  if (config_.gradient_checkpointing_every < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient_checkpointing_every: expected 1 or more, got ",
                     config_.gradient_checkpointing_every));
  }
  CheckpointOptions options;
  options.offload_inputs = config_.gradient_checkpointing_offload;
  if (config_.gradient_checkpointing_keep == "matmuls") {
    options.keep = matmuls_and_attention();
  } else if (config_.gradient_checkpointing_keep != "nothing") {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient_checkpointing_keep: expected nothing or "
                     "matmuls, got '",
                     config_.gradient_checkpointing_keep, "'"));
  }
  const ModuleList layers = model_->checkpoint_modules();
  const auto is_layer = [&](const std::string&, torch::nn::Module& module) {
    return std::any_of(layers.begin(), layers.end(), [&](const auto& layer) {
      return layer.get() == &module;
    });
  };
  const int k = static_cast<int>(config_.gradient_checkpointing_every);
  return apply_activation_checkpointing(*model_, every_kth(k, is_layer),
                                        options)
      .status();
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
    options.mixed_precision.keep_low_precision_grads =
        config_.keep_low_precision_grads;
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
      {"activation checkpointing", describe_checkpointing(config_)},
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

}  // namespace fullshard
