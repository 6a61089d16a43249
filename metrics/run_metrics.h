#ifndef FULLSHARD_METRICS_RUN_METRICS_H_
#define FULLSHARD_METRICS_RUN_METRICS_H_

#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fullshard {

// What one optimizer step reports. Losses are means over all ranks.
struct StepRecord {
  int64_t step = 0;  // From 1.
  int64_t epoch = 0;
  double loss = 0;
  double learning_rate = 0;  // That the step used.
  double gradient_norm = 0;  // Before clipping.
  double seconds = 0;
  int64_t num_examples = 0;
  int64_t num_tokens = 0;  // That the loss counted.
};

// The files of a run's numbers: <run_id>.jsonl with one object per optimizer
// step, and run-metrics.jsonl with the run's settings. Keys are those of the
// Prismatic trainers ("Finetune/Loss"). Used on rank 0.
class RunMetrics {
 public:
  // Smoothed values are means over this many steps.
  static constexpr size_t kWindow = 128;

  // `hparams_json` is written as one object. Existing files are continued.
  // Errors: kUnavailable naming the file.
  static absl::StatusOr<std::unique_ptr<RunMetrics>> create(
      const std::string& run_dir, const std::string& run_id,
      const std::string& stage, const std::string& hparams_json);

  // Removes the lines of later steps, which a run that goes on from `step`
  // writes again. Call before log().
  absl::Status drop_after(int64_t step);

  // Errors: kUnavailable if the line cannot be written.
  absl::Status log(const StepRecord& record);

  double smoothed_loss() const { return mean(losses_); }
  double smoothed_step_seconds() const { return mean(seconds_); }

 private:
  RunMetrics() = default;
  static double mean(const std::deque<double>& values);

  std::string path_;
  std::string prefix_;
  std::shared_ptr<std::FILE> file_;
  std::deque<double> losses_, seconds_;
};

}  // namespace fullshard

#endif  // FULLSHARD_METRICS_RUN_METRICS_H_
