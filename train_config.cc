#include "fullshard/train_config.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "fullshard/core/status.h"

namespace fullshard {
namespace {

// Calls f(key, field, help) for every setting: the one list from which flags,
// files, help and the written configs follow.
template <class Config, class F>
void for_each_field(Config& config, F f) {
  auto& s = config.strategy;
  f("data", config.data, "what to train on: fashion-captions");
  f("stage", s.stage,
    "which modules train: align, finetune, full-finetune, "
    "last-layer-finetune");
  f("sharding", s.sharding,
    "full-shard, shard-grad-op, global-full-shard or no-shard");
  f("nproc", config.nproc, "ranks to start on this host");
  f("backend", config.backend,
    "shm, gloo, shm+gloo, nccl, single or fake; empty: the best");
  f("epochs", s.epochs, "passes over the data, if max_steps is none");
  f("max_steps", s.max_steps, "optimizer steps, or none");
  f("global_batch_size", s.global_batch_size, "examples of one step");
  f("per_device_batch_size", s.per_device_batch_size,
    "examples of one micro-batch of a rank; 0: no accumulation");
  f("learning_rate", s.learning_rate, "peak learning rate of AdamW");
  f("weight_decay", s.weight_decay, "of matrices; never of vectors, biases");
  f("max_grad_norm", s.max_grad_norm, "clipping; 0: none");
  f("lr_scheduler_type", s.lr_scheduler_type,
    "linear-warmup+cosine-decay, constant, linear-warmup+constant, "
    "warmup-stable-decay or inverse-square-root");
  f("warmup_ratio", s.warmup_ratio, "part of the steps that warm up");
  f("min_lr_ratio", s.min_lr_ratio, "of the peak, where a decay ends");
  f("lr_decay_ratio", s.lr_decay_ratio,
    "part of the steps that warmup-stable-decay decays");
  f("lr_decay_shape", s.lr_decay_shape, "linear, cosine or 1-sqrt");
  f("enable_gradient_checkpointing", s.enable_gradient_checkpointing,
    "recompute activations of the language model's layers");
  f("gradient_checkpointing_every", s.gradient_checkpointing_every,
    "of the first layer and every k-th after it");
  f("gradient_checkpointing_keep", s.gradient_checkpointing_keep,
    "what is not recomputed: nothing, or matmuls");
  f("gradient_checkpointing_offload", s.gradient_checkpointing_offload,
    "keep the inputs of recomputed layers in host memory");
  f("enable_mixed_precision_training", s.enable_mixed_precision_training,
    "compute in mixed_precision_dtype; false: fp32");
  f("mixed_precision_dtype", s.mixed_precision_dtype,
    "bf16, or fp16 with loss scaling");
  f("reduce_in_full_precision", s.reduce_in_full_precision,
    "reduce gradients in fp32");
  f("keep_low_precision_grads", s.keep_low_precision_grads,
    "keep gradients in the dtype in which they are reduced");
  f("loss_weighting", s.loss_weighting,
    "mean of micro-batches, or tokens: every token alike");
  f("seed", s.seed, "of initialisation and order");
  f("pretrained_checkpoint", config.pretrained_checkpoint,
    "a .pt file or run folder whose modules to start from");
  f("resume", config.resume,
    "a run folder (its latest complete checkpoint) or a checkpoint to go on "
    "from exactly, with the run's settings");
  f("save_interval", s.save_interval,
    "steps between checkpoints to resume from; 0: at the end only");
  f("keep_last", s.keep_last, "how many of these to keep; 0: all");
  f("save_async", s.save_async, "go on training while one is written");
  f("run_root_dir", config.run_root_dir, "where run folders go");
  f("run_id", config.run_id, "name of the run folder; empty: made");
  f("show_images", config.show_images, "held-out images to draw");
}

std::string show(const std::string& value) { return value; }
std::string show(bool value) { return value ? "true" : "false"; }
std::string show(int64_t value) { return absl::StrCat(value); }
std::string show(uint64_t value) { return absl::StrCat(value); }
// As short as reading it back exactly allows.
std::string show(double value) {
  std::string text;
  for (int digits = 1; digits <= 17; ++digits) {
    text = absl::StrFormat("%.*g", digits, value);
    double read = 0;
    if (absl::SimpleAtod(text, &read) && read == value) break;
  }
  return text;
}
std::string show(const std::optional<int64_t>& value) {
  return value.has_value() ? absl::StrCat(*value) : "none";
}

// Each returns what was expected, or null if `text` was taken.
const char* take(const std::string& text, std::string& field) {
  field = text;
  return nullptr;
}
const char* take(const std::string& text, bool& field) {
  return absl::SimpleAtob(text, &field) ? nullptr : "true or false";
}
const char* take(const std::string& text, int64_t& field) {
  return absl::SimpleAtoi(text, &field) ? nullptr : "an integer";
}
const char* take(const std::string& text, uint64_t& field) {
  return absl::SimpleAtoi(text, &field) ? nullptr : "a positive integer";
}
const char* take(const std::string& text, double& field) {
  return absl::SimpleAtod(text, &field) && std::isfinite(field)
             ? nullptr
             : "a finite number";
}
const char* take(const std::string& text, std::optional<int64_t>& field) {
  int64_t value = 0;
  if (text == "none") {
    field.reset();
  } else if (absl::SimpleAtoi(text, &value)) {
    field = value;
  } else {
    return "an integer or none";
  }
  return nullptr;
}

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1,
                         diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

absl::Status set_field(TrainConfig& config, const std::string& key,
                       const std::string& value, const std::string& where) {
  bool found = false;
  const char* expected = nullptr;
  std::string nearest;
  for_each_field(config,
                 [&](const std::string& name, auto& field, const char*) {
                   if (name == key) {
                     found = true;
                     expected = take(value, field);
                   }
                   if (nearest.empty() ||
                       edit_distance(name, key) < edit_distance(nearest, key)) {
                     nearest = name;
                   }
                 });
  if (!found) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": unknown key '", key, "'; the nearest is '", nearest, "'"));
  }
  if (expected != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": ", key, ": expected ", expected, ", got '", value, "'"));
  }
  return absl::OkStatus();
}

absl::Status read_file(TrainConfig& config, const std::string& path) {
  YAML::Node root;
  try {
    root = YAML::LoadFile(user_path(path));
  } catch (const YAML::BadFile&) {
    return absl::NotFoundError(
        absl::StrCat("--config: cannot read ", user_path(path)));
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.what()));
  }
  if (root.IsNull()) return absl::OkStatus();
  if (!root.IsMap()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected a map of settings"));
  }
  for (const auto& item : root) {
    const std::string key = item.first.Scalar();
    const std::string where =
        absl::StrCat(path, ":", item.first.Mark().line + 1);
    if (!item.second.IsScalar() && !item.second.IsNull()) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": ", key, ": expected one value"));
    }
    FS_RETURN_IF_ERROR(
        set_field(config, key,
                  item.second.IsNull() ? "none" : item.second.Scalar(), where));
  }
  return absl::OkStatus();
}

// The run folder that holds a checkpoint, or is `path` itself.
absl::StatusOr<std::filesystem::path> run_folder_of(const std::string& path) {
  const std::filesystem::path given =
      std::filesystem::path(path).lexically_normal();
  std::error_code ignored;
  std::filesystem::path folder =
      given.has_filename() ? given : given.parent_path();
  for (int levels = 0; levels < 3; ++levels) {
    if (std::filesystem::exists(
            std::filesystem::path(user_path(folder.string())) / "config.yaml",
            ignored)) {
      return folder;
    }
    folder = folder.parent_path();
  }
  return absl::NotFoundError(absl::StrCat(
      "--resume: expected the folder of a run, with config.yaml, or of one of "
      "its checkpoints; got ",
      path));
}

absl::Status check(const TrainConfig& config) {
  auto refuse = [](absl::string_view message) {
    return absl::InvalidArgumentError(message);
  };
  if (config.nproc < 1 || config.nproc > 256) {
    return refuse(absl::StrCat("nproc: expected 1 to 256, got ", config.nproc));
  }
  if (config.data != "fashion-captions") {
    return refuse(absl::StrCat("data: expected fashion-captions, got '",
                               config.data, "'"));
  }
  if (config.strategy.epochs < 1) {
    return refuse(absl::StrCat("epochs: expected 1 or more, got ",
                               config.strategy.epochs));
  }
  if (config.strategy.max_steps.value_or(1) < 1) {
    return refuse(absl::StrCat("max_steps: expected 1 or more, got ",
                               *config.strategy.max_steps));
  }
  const std::pair<const char*, double> never_negative[] = {
      {"learning_rate", config.strategy.learning_rate},
      {"weight_decay", config.strategy.weight_decay},
      {"max_grad_norm", config.strategy.max_grad_norm},
      {"save_interval", static_cast<double>(config.strategy.save_interval)},
      {"keep_last", static_cast<double>(config.strategy.keep_last)},
      {"show_images", static_cast<double>(config.show_images)}};
  for (const auto& [key, value] : never_negative) {
    if (value >= 0) continue;
    return refuse(absl::StrCat(key, ": expected 0 or more, got ", show(value)));
  }
  if (config.run_id.find('/') != std::string::npos) {
    return refuse(absl::StrCat("run_id: expected a name without '/', got '",
                               config.run_id, "'"));
  }
  return absl::OkStatus();
}

}  // namespace

TrainConfig::TrainConfig() {
  strategy.stage = "full-finetune";
  strategy.max_steps = 1300;
  strategy.global_batch_size = 72;
  strategy.per_device_batch_size = 0;
  strategy.learning_rate = 2e-3;
  strategy.weight_decay = 0.05;
  strategy.warmup_ratio = 0.05;
  // Few CPUs compute bf16 faster than fp32, and the model is small.
  strategy.enable_mixed_precision_training = false;
  strategy.enable_gradient_checkpointing = false;
  strategy.sharding = "full-shard";
}

absl::StatusOr<TrainConfig> parse_train_config(
    const std::vector<std::string>& arguments) {
  TrainConfig config;
  constexpr char kConfig[] = "--config=";
  constexpr char kResume[] = "--resume=";
  for (const std::string& argument : arguments) {
    if (!absl::StartsWith(argument, kResume)) continue;
    FS_ASSIGN_OR_RETURN(const std::filesystem::path folder,
                        run_folder_of(argument.substr(sizeof(kResume) - 1)));
    FS_RETURN_IF_ERROR(read_file(config, (folder / "config.yaml").string()));
    config.run_root_dir =
        folder.has_parent_path() ? folder.parent_path().string() : ".";
    config.run_id = folder.filename().string();
  }
  for (const std::string& argument : arguments) {
    if (absl::StartsWith(argument, kConfig)) {
      FS_RETURN_IF_ERROR(
          read_file(config, argument.substr(sizeof(kConfig) - 1)));
    }
  }
  for (const std::string& argument : arguments) {
    if (absl::StartsWith(argument, kConfig)) continue;
    if (!absl::StartsWith(argument, "--")) {
      return absl::InvalidArgumentError(absl::StrCat(
          "command line: expected --key=value, got '", argument, "'"));
    }
    const size_t equals = argument.find('=');
    const std::string key = argument.substr(
        2, equals == std::string::npos ? std::string::npos : equals - 2);
    FS_RETURN_IF_ERROR(set_field(
        config, key,
        equals == std::string::npos ? "true" : argument.substr(equals + 1),
        "command line"));
  }
  FS_RETURN_IF_ERROR(check(config));
  return config;
}

std::string train_config_help() {
  std::string text =
      "Trains a vision-language model, sharded over several processes.\n\n"
      "  bazel run //:train -- [--config=FILE] [--key=value ...]\n\n";
  TrainConfig defaults;
  for_each_field(
      defaults, [&](const char* name, auto& field, const char* help) {
        absl::StrAppendFormat(&text, "  --%-34s %s\n",
                              absl::StrCat(name, "=", show(field)), help);
      });
  return text;
}

std::string to_yaml(const TrainConfig& config) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  for_each_field(config, [&](const char* name, auto& field, const char*) {
    out << YAML::Key << name << YAML::Value << show(field);
  });
  out << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

std::string to_json(const TrainConfig& config) {
  nlohmann::ordered_json root;
  for_each_field(config, [&](const char* name, auto& field, const char*) {
    using Field = std::decay_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, std::optional<int64_t>>) {
      root[name] = field.has_value() ? nlohmann::ordered_json(*field)
                                     : nlohmann::ordered_json();
    } else {
      root[name] = field;
    }
  });
  return root.dump(2) + "\n";
}

std::string user_path(const std::string& path) {
  const char* called_from = std::getenv("BUILD_WORKING_DIRECTORY");
  if (called_from == nullptr || path.empty()) return path;
  return (std::filesystem::path(called_from) / path).lexically_normal();
}

}  // namespace fullshard
