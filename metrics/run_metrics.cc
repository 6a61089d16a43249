#include "fullshard/metrics/run_metrics.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"

namespace fullshard {
namespace {

absl::Status file_error(const std::string& path) {
  return absl::UnavailableError(
      absl::StrCat("cannot write ", path, ": ", std::strerror(errno)));
}

absl::StatusOr<std::shared_ptr<std::FILE>> open_for_append(
    const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) return file_error(path);
  return std::shared_ptr<std::FILE>(file, &std::fclose);
}

absl::Status write_line(const std::shared_ptr<std::FILE>& file,
                        const std::string& path, const std::string& line) {
  if (std::fputs((line + "\n").c_str(), file.get()) < 0 ||
      std::fflush(file.get()) != 0) {
    return file_error(path);
  }
  return absl::OkStatus();
}

void push(std::deque<double>& window, double value) {
  window.push_back(value);
  if (window.size() > RunMetrics::kWindow) window.pop_front();
}

}  // namespace

absl::StatusOr<std::unique_ptr<RunMetrics>> RunMetrics::create(
    const std::string& run_dir, const std::string& run_id,
    const std::string& stage, const std::string& hparams_json) {
  const std::string hparams_path = absl::StrCat(run_dir, "/run-metrics.jsonl");
  FS_ASSIGN_OR_RETURN(const auto hparams, open_for_append(hparams_path));
  FS_RETURN_IF_ERROR(write_line(
      hparams, hparams_path,
      nlohmann::json{{"run_id", run_id},
                     {"hparams", nlohmann::json::parse(hparams_json)}}
          .dump()));
  std::unique_ptr<RunMetrics> metrics(new RunMetrics);
  metrics->path_ = absl::StrCat(run_dir, "/", run_id, ".jsonl");
  metrics->prefix_ = absl::StrContains(stage, "vla") ? "VLA Train"
                     : stage == "align"              ? "Align"
                                                     : "Finetune";
  FS_ASSIGN_OR_RETURN(metrics->file_, open_for_append(metrics->path_));
  return metrics;
}

absl::Status RunMetrics::drop_after(int64_t step) {
  file_.reset();
  std::string kept;
  {
    std::ifstream file(path_);
    for (std::string line; std::getline(file, line);) {
      const auto parsed = nlohmann::json::parse(line, nullptr, false);
      const std::string key = absl::StrCat(prefix_, "/Step");
      // A line that was cut off belongs to a step that is done again.
      if (parsed.is_object() && parsed.contains(key) &&
          parsed[key].is_number_integer() && parsed[key] <= step) {
        absl::StrAppend(&kept, line, "\n");
      }
    }
  }
  const std::string temporary = absl::StrCat(path_, ".tmp");
  {
    std::ofstream file(temporary);
    file << kept;
    file.close();
    if (!file) return file_error(temporary);
  }
  if (std::rename(temporary.c_str(), path_.c_str()) != 0) {
    return file_error(path_);
  }
  FS_ASSIGN_OR_RETURN(file_, open_for_append(path_));
  return absl::OkStatus();
}

absl::Status RunMetrics::log(const StepRecord& record) {
  push(losses_, record.loss);
  push(seconds_, record.seconds);
  const auto key = [&](const char* name) {
    return absl::StrCat(prefix_, "/", name);
  };
  nlohmann::ordered_json line;
  line[key("Step")] = record.step;
  line[key("Epoch")] = record.epoch;
  line[key("Loss")] = smoothed_loss();
  line[key("Loss (Raw)")] = record.loss;
  line[key("Learning Rate")] = record.learning_rate;
  line[key("Gradient Norm")] = record.gradient_norm;
  line[key("Step Time")] = record.seconds;
  line[key("Samples per Second")] =
      static_cast<double>(record.num_examples) / record.seconds;
  line[key("Tokens per Second")] =
      static_cast<double>(record.num_tokens) / record.seconds;
  return write_line(file_, path_, line.dump());
}

double RunMetrics::mean(const std::deque<double>& values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) /
         static_cast<double>(values.size());
}

}  // namespace fullshard
