#include "fullshard/train_job.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <system_error>
#include <utility>

#include "ATen/Context.h"
#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "fullshard/caption_evaluation.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/core/status.h"
#include "fullshard/data/fashion_captions.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/metrics/run_metrics.h"
#include "fullshard/models/prismatic.h"
#include "fullshard/terminal/draw_images.h"
#include "fullshard/terminal/progress_line.h"

namespace fullshard {
namespace {

std::atomic<bool> g_stop{false};

void ask_to_stop(int) { g_stop = true; }

absl::Status write_file(const std::filesystem::path& path,
                        const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path.string()));
  }
  return absl::OkStatus();
}

// Where the run's files go; rank 0 creates it.
absl::StatusOr<std::string> make_run_dir(const TrainConfig& config,
                                         const std::string& run_id) {
  const std::filesystem::path folder =
      std::filesystem::path(user_path(config.run_root_dir)) / run_id;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat("run_root_dir: cannot create ",
                                               folder.string(), ": ",
                                               error.message()));
  }
  return folder.string();
}

absl::Status write_config(const TrainConfig& config,
                          const std::filesystem::path& folder) {
  FS_RETURN_IF_ERROR(write_file(folder / "config.yaml", to_yaml(config)));
  return write_file(folder / "config.json", to_json(config));
}

std::shared_ptr<Prismatic> make_model(const TrainConfig& config,
                                      const CaptionDataset& data) {
  at::manual_seed(config.strategy.seed);
  PrismaticOptions options;
  options.vision.image_size = data.image(0).size(0);
  options.decoder.vocab_size = data.tokenizer().vocab_size();
  return std::make_shared<Prismatic>(options);
}

// The run as rank 0 shows and records it.
class Reporter {
 public:
  static absl::StatusOr<std::unique_ptr<Reporter>> create(
      const TrainConfig& config, const std::string& run_dir) {
    auto reporter = std::make_unique<Reporter>();
    FS_ASSIGN_OR_RETURN(
        reporter->metrics_,
        RunMetrics::create(run_dir, config.run_id, config.strategy.stage,
                           to_json(config)));
    return reporter;
  }

  absl::Status resume(int64_t step) { return metrics_->drop_after(step); }

  absl::Status step(const StepMetrics& step) {
    FS_RETURN_IF_ERROR(metrics_->log(
        {step.step, step.epoch, step.result.loss, step.result.learning_rate,
         step.result.gradient_norm, step.seconds, step.result.num_examples,
         step.result.num_targets}));
    const double seconds = metrics_->smoothed_step_seconds();
    const bool last = step.step == step.total_steps || step.result.stop;
    line_.show(
        absl::StrFormat(
            "step %d/%d  loss %.4f  norm %.3f  rate %.2e  %.0f samples/s  "
            "%s left",
            step.step, step.total_steps, metrics_->smoothed_loss(),
            step.result.gradient_norm, step.result.learning_rate,
            static_cast<double>(step.result.num_examples) / seconds,
            format_duration(seconds *
                            static_cast<double>(step.total_steps - step.step))),
        last);
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<RunMetrics> metrics_;
  ProgressLine line_;
};

void draw(const CaptionDataset& data, const std::vector<int64_t>& examples,
          const std::vector<std::string>& before,
          const std::vector<std::string>& after) {
  std::vector<CaptionedImage> images;
  for (size_t i = 0; i < examples.size(); ++i) {
    const bool right = after[i] == data.caption(examples[i]);
    images.push_back(
        {data.image(examples[i]),
         {absl::StrCat("before: ", before[i]),
          absl::StrCat("after:  ", after[i]),
          right ? "right"
                : absl::StrCat("wrong, it is ", data.caption(examples[i]))}});
  }
  std::printf("%s", draw_images(images).c_str());
}

// Learning from captions, from set-up to the last line.
class Job {
 public:
  // `given`: as the user gave it, for the run's files.
  Job(const TrainConfig& config, const TrainConfig& given, ProcessGroups groups,
      FashionCaptions data)
      : config_(config),
        given_(given),
        groups_(std::move(groups)),
        data_(std::move(data)) {}

  absl::Status run() {
    std::shared_ptr<Prismatic> model = make_model(config_, data_.training);
    FS_RETURN_IF_ERROR(model->freeze_backbones(config_.strategy.stage));
    std::string run_dir;
    FS_RETURN_IF_ERROR(on_rank_0([&]() -> absl::Status {
      FS_ASSIGN_OR_RETURN(run_dir, make_run_dir(config_, config_.run_id));
      FS_ASSIGN_OR_RETURN(reporter_, Reporter::create(config_, run_dir));
      return absl::OkStatus();
    }));
    if (run_dir.empty()) {
      run_dir =
          absl::StrCat(user_path(config_.run_root_dir), "/", config_.run_id);
    }
    Strategy strategy(std::move(model), groups_, config_.strategy);
    FS_RETURN_IF_ERROR(
        strategy.run_setup(run_dir, data_.training.num_examples()));
    if (!config_.resume.empty()) {
      FS_RETURN_IF_ERROR(resume(strategy));
    } else if (!config_.pretrained_checkpoint.empty()) {
      FS_RETURN_IF_ERROR(
          strategy.load_checkpoint(user_path(config_.pretrained_checkpoint)));
    }
    // Not before: a mistake must not change the settings that a run has.
    FS_RETURN_IF_ERROR(
        on_rank_0([&] { return write_config(given_, run_dir); }));
    const std::vector<int64_t> shown = shown_examples();
    const auto before = caption_images(strategy, data_.held_out, shown);
    FS_ASSIGN_OR_RETURN(const TrainingSummary summary, train(strategy));
    const auto after = caption_images(strategy, data_.held_out, shown);
    const CaptionScore score = score_captions(strategy, data_.held_out);
    if (groups_.rank() == 0) {
      if (config_.show_images > 0) draw(data_.held_out, shown, before, after);
      std::printf("%s; held-out loss %.4f per token\n", summary.reason.c_str(),
                  score.loss);
      std::printf("held-out exact captions: %.1f %% (%d of %d); files in %s\n",
                  100.0 * static_cast<double>(score.num_exact) /
                      static_cast<double>(score.num_examples),
                  static_cast<int>(score.num_exact),
                  static_cast<int>(score.num_examples), run_dir.c_str());
    }
    return absl::OkStatus();
  }

 private:
  // Runs `f` on rank 0; its failure ends the job on every rank.
  template <class F>
  absl::Status on_rank_0(F f) {
    const absl::Status status = groups_.rank() == 0 ? f() : absl::OkStatus();
    at::Tensor failed =
        at::full({1}, status.ok() ? 0 : 1,
                 at::TensorOptions(groups_.device()).dtype(at::kLong));
    if (groups_.world_size() > 1) {
      std::vector<at::Tensor> tensors = {failed};
      groups_.world()->broadcast(tensors)->wait();
    }
    FS_RETURN_IF_ERROR(status);
    return failed.item<int64_t>() == 0
               ? absl::OkStatus()
               : absl::AbortedError("rank 0 could not start");
  }

  absl::Status resume(Strategy& strategy) {
    std::string path = user_path(config_.resume);
    if (!std::filesystem::exists(path + "/" + kManifestName)) {
      for (const char* const folder : {"/checkpoints", ""}) {
        const LatestCheckpoint latest = find_latest_checkpoint(path + folder);
        for (const std::string& skipped : latest.skipped) {
          if (groups_.rank() == 0) log_warning(skipped);
        }
        if (latest.path.empty()) continue;
        path = latest.path;
        break;
      }
    }
    FS_RETURN_IF_ERROR(strategy.resume(path));
    return reporter_ ? reporter_->resume(strategy.global_step())
                     : absl::OkStatus();
  }

  std::vector<int64_t> shown_examples() const {
    std::vector<int64_t> examples(static_cast<size_t>(
        std::min<int64_t>(std::max<int64_t>(1, config_.show_images),
                          data_.held_out.num_examples())));
    std::iota(examples.begin(), examples.end(), 0);
    return examples;
  }

  absl::StatusOr<TrainingSummary> train(Strategy& strategy) {
    const CaptionDataset::Augmentation augmentation = {
        /*flip=*/true, /*shift=*/1, config_.strategy.seed};
    TrainingData training;
    training.num_examples = data_.training.num_examples();
    training.collate = [&, augmentation](const std::vector<int64_t>& examples,
                                         int64_t epoch) {
      return data_.training.augmented_batch(examples, epoch, augmentation);
    };
    TrainingHooks hooks;
    hooks.stop_requested = [] { return g_stop.load(); };
    hooks.on_step = [&](const StepMetrics& step) {
      return reporter_ ? reporter_->step(step) : absl::OkStatus();
    };
    return strategy.run_training(training, hooks);
  }

  const TrainConfig config_;
  const TrainConfig given_;
  const ProcessGroups groups_;
  const FashionCaptions data_;
  std::unique_ptr<Reporter> reporter_;
};

}  // namespace

absl::Status run_train_job(const TrainConfig& config, const LaunchEnv& env) {
  std::signal(SIGINT, ask_to_stop);
  std::signal(SIGTERM, ask_to_stop);
  set_log_rank(env.rank, env.world_size);
  TrainConfig resolved = config;
  StrategyConfig& settings = resolved.strategy;
  if (settings.per_device_batch_size == 0) {
    // No accumulation; run_setup explains it if the ranks do not divide it.
    settings.per_device_batch_size =
        std::max<int64_t>(1, settings.global_batch_size / env.world_size);
  }
  ProcessGroupsOptions options;
  options.backend = config.backend;
  try {
    FS_ASSIGN_OR_RETURN(FashionCaptions data, load_fashion_captions());
    FS_ASSIGN_OR_RETURN(ProcessGroups groups,
                        init_process_groups(env, options));
    return Job(resolved, config, std::move(groups), std::move(data)).run();
  } catch (const c10::Error& error) {
    return absl::InternalError(error.what_without_backtrace());
  }
}

absl::StatusOr<Plan> plan_train_job(const TrainConfig& config, int num_ranks,
                                    int num_shards) {
  LaunchEnv env;
  env.world_size = env.local_world_size = num_ranks;
  ProcessGroupsOptions options;
  options.backend = "fake";
  options.shard_group_size = num_shards;
  StrategyConfig settings = config.strategy;
  settings.per_device_batch_size = 1;  // Batches do not matter here.
  settings.global_batch_size = num_ranks;
  try {
    FS_ASSIGN_OR_RETURN(const FashionCaptions data, load_fashion_captions());
    FS_ASSIGN_OR_RETURN(ProcessGroups groups,
                        init_process_groups(env, options));
    auto model = make_model(config, data.training);
    FS_RETURN_IF_ERROR(model->freeze_backbones(settings.stage));
    Strategy strategy(model, std::move(groups), settings);
    FS_RETURN_IF_ERROR(
        strategy.run_setup(/*run_dir=*/"", data.training.num_examples()));
    return strategy.sharded().plan();
  } catch (const c10::Error& error) {
    return absl::InternalError(error.what_without_backtrace());
  }
}

}  // namespace fullshard
