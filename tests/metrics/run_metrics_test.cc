#include "fullshard/metrics/run_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "fullshard/tests/io/temp_dir.h"

namespace fullshard {
namespace {

using nlohmann::json;
using testing::HasSubstr;

std::vector<json> objects_of(const std::string& path) {
  std::vector<json> objects;
  std::istringstream lines(read_file(path));
  for (std::string line; std::getline(lines, line);) {
    objects.push_back(json::parse(line));
  }
  return objects;
}

StepRecord record_of(int64_t step, double loss) {
  StepRecord record;
  record.step = step;
  record.loss = loss;
  record.learning_rate = 2e-3;
  record.gradient_norm = 0.5;
  record.seconds = 0.25;
  record.num_examples = 60;
  record.num_tokens = 480;
  return record;
}

TEST(RunMetricsTest, WritesOneObjectPerStepWithTheTrainersKeys) {
  const TempDir dir;
  const auto metrics = *RunMetrics::create(dir.file(""), "r", "finetune", "{}");
  ASSERT_TRUE(metrics->log(record_of(1, 3.0)).ok());
  ASSERT_TRUE(metrics->log(record_of(2, 2.0)).ok());
  const std::vector<json> steps = objects_of(dir.file("r.jsonl"));
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[1], (json{{"Finetune/Step", 2},
                            {"Finetune/Epoch", 0},
                            {"Finetune/Loss", 2.5},
                            {"Finetune/Loss (Raw)", 2.0},
                            {"Finetune/Learning Rate", 2e-3},
                            {"Finetune/Gradient Norm", 0.5},
                            {"Finetune/Step Time", 0.25},
                            {"Finetune/Samples per Second", 240.0},
                            {"Finetune/Tokens per Second", 1920.0}}));
}

TEST(RunMetricsTest, NamesKeysAfterTheStage) {
  const std::pair<const char*, const char*> cases[] = {
      {"align", "Align/Loss"},
      {"full-finetune", "Finetune/Loss"},
      {"vla-full-train", "VLA Train/Loss"}};
  for (const auto& [stage, key] : cases) {
    const TempDir dir;
    const auto metrics = *RunMetrics::create(dir.file(""), "r", stage, "{}");
    ASSERT_TRUE(metrics->log(record_of(1, 1.0)).ok());
    EXPECT_TRUE(objects_of(dir.file("r.jsonl"))[0].contains(key)) << stage;
  }
}

TEST(RunMetricsTest, SmoothsOverTheLast128Steps) {
  const TempDir dir;
  const auto metrics = *RunMetrics::create(dir.file(""), "r", "align", "{}");
  EXPECT_EQ(metrics->smoothed_loss(), 0);
  ASSERT_TRUE(metrics->log(record_of(1, 1000)).ok());
  for (int64_t step = 2; step <= 129; ++step) {
    ASSERT_TRUE(metrics->log(record_of(step, step % 2 == 0 ? 1 : 3)).ok());
  }
  EXPECT_DOUBLE_EQ(metrics->smoothed_loss(), 2);
  EXPECT_DOUBLE_EQ(metrics->smoothed_step_seconds(), 0.25);
}

TEST(RunMetricsTest, WritesSettingsOncePerRunAndKeepsEarlierLines) {
  const TempDir dir;
  for (const char* seed : {"7", "8"}) {
    const auto metrics = *RunMetrics::create(
        dir.file(""), "r", "align", std::string("{\"seed\": ") + seed + "}");
    ASSERT_TRUE(metrics->log(record_of(1, 1.0)).ok());
  }
  const std::vector<json> runs = objects_of(dir.file("run-metrics.jsonl"));
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[1], (json{{"run_id", "r"}, {"hparams", {{"seed", 8}}}}));
  EXPECT_EQ(objects_of(dir.file("r.jsonl")).size(), 2u);
}

TEST(RunMetricsTest, NamesAFileItCannotWrite) {
  const TempDir dir;
  const absl::Status status =
      RunMetrics::create(dir.file("absent"), "r", "align", "{}").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("absent/run-metrics.jsonl"));
}

}  // namespace
}  // namespace fullshard
