#include "fullshard/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "fullshard/core/status.h"

namespace fullshard {
namespace {

constexpr double kPi = 3.14159265358979323846;
constexpr int64_t kInverseSquareRootTimescale = 10000;
constexpr char kLinear[] = "linear";
constexpr char kCosine[] = "cosine";
constexpr char kOneMinusSqrt[] = "1-sqrt";

absl::Status check_ratio(const char* name, double value) {
  if (value >= 0 && value <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": expected a value from 0 to 1, got ", value));
}

// Returns the place of `value` in `known`.
absl::StatusOr<size_t> find(const char* name, const std::string& value,
                            const std::vector<std::string>& known) {
  const auto found = std::find(known.begin(), known.end(), value);
  if (found != known.end()) return static_cast<size_t>(found - known.begin());
  return absl::InvalidArgumentError(absl::StrCat(name, ": expected one of ",
                                                 absl::StrJoin(known, ", "),
                                                 "; got '", value, "'"));
}

int64_t part_of(int64_t steps, double ratio) {
  return static_cast<int64_t>(static_cast<double>(steps) * ratio);
}

double ratio(int64_t part, int64_t whole) {
  return static_cast<double>(part) /
         static_cast<double>(std::max<int64_t>(1, whole));
}

}  // namespace

// In the order of Type.
const std::vector<std::string>& LrSchedule::types() {
  static const auto* const types = new std::vector<std::string>{
      "linear-warmup+cosine-decay", "constant", "linear-warmup+constant",
      "warmup-stable-decay", "inverse-square-root"};
  return *types;
}

absl::StatusOr<LrSchedule> LrSchedule::create(const std::string& type,
                                              int64_t total_steps,
                                              double warmup_ratio) {
  LrScheduleOptions options;
  options.type = type;
  options.total_steps = total_steps;
  options.warmup_ratio = warmup_ratio;
  return create(options);
}

absl::StatusOr<LrSchedule> LrSchedule::create(
    const LrScheduleOptions& options) {
  FS_ASSIGN_OR_RETURN(const size_t type,
                      find("lr_scheduler_type", options.type, types()));
  FS_RETURN_IF_ERROR(check_ratio("warmup_ratio", options.warmup_ratio));
  FS_RETURN_IF_ERROR(check_ratio("min_lr_ratio", options.min_lr_ratio));
  FS_RETURN_IF_ERROR(check_ratio("decay_ratio", options.decay_ratio));
  FS_RETURN_IF_ERROR(find("decay_shape", options.decay_shape,
                          {kLinear, kCosine, kOneMinusSqrt})
                         .status());
  if (options.total_steps < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("learning rate schedule: expected 0 or more steps, got ",
                     options.total_steps));
  }
  if (options.warmup_steps.value_or(0) < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "warmup_steps: expected 0 or more, got ", *options.warmup_steps));
  }
  LrSchedule schedule;
  schedule.options_ = options;
  schedule.type_ = static_cast<Type>(type);
  const bool is_constant = schedule.type_ == Type::kConstant;
  if (options.min_lr_ratio != 0 &&
      (is_constant || schedule.type_ == Type::kWarmupConstant)) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_lr_ratio: expected 0, as '", options.type,
                     "' does not decay; got ", options.min_lr_ratio));
  }
  if (!is_constant) {
    schedule.warmup_steps_ = options.warmup_steps.value_or(
        part_of(options.total_steps, options.warmup_ratio));
  }
  if (schedule.type_ == Type::kWarmupStableDecay) {
    schedule.decay_steps_ = part_of(options.total_steps, options.decay_ratio);
    if (schedule.warmup_steps_ + schedule.decay_steps_ > options.total_steps) {
      return absl::InvalidArgumentError(absl::StrCat(
          "warmup-stable-decay: expected warmup and decay to fit into ",
          options.total_steps, " steps, got ", schedule.warmup_steps_, " and ",
          schedule.decay_steps_));
    }
  }
  return schedule;
}

double LrSchedule::decayed(double progress) const {
  double left = (1 + std::cos(kPi * progress)) / 2;
  if (type_ == Type::kWarmupStableDecay) {
    if (options_.decay_shape == kLinear) left = 1 - progress;
    if (options_.decay_shape == kOneMinusSqrt) left = 1 - std::sqrt(progress);
  }
  const double floor = options_.min_lr_ratio;
  return std::max(0.0, floor + (1 - floor) * left);
}

double LrSchedule::factor(int64_t step) const {
  if (type_ == Type::kWarmupCosine && step == 0) return 0;
  const double floor = options_.min_lr_ratio;
  if (step < warmup_steps_) {
    const double warmed = ratio(step, warmup_steps_);
    return type_ == Type::kWarmupStableDecay ? floor + (1 - floor) * warmed
                                             : warmed;
  }
  const int64_t total = options_.total_steps;
  step = std::max(std::min(step, total), warmup_steps_);
  switch (type_) {
    case Type::kConstant:
    case Type::kWarmupConstant:
      return 1;
    case Type::kWarmupCosine:
      return decayed(ratio(step - warmup_steps_, total - warmup_steps_));
    case Type::kWarmupStableDecay: {
      const int64_t done = step - (total - decay_steps_);
      if (step == total) return floor;  // Also when no step decays.
      return done < 0 ? 1 : decayed(ratio(done, decay_steps_));
    }
    case Type::kInverseSquareRoot: {
      const int64_t scale =
          warmup_steps_ > 0 ? warmup_steps_ : kInverseSquareRootTimescale;
      return std::max(
          floor, 1 / std::sqrt(ratio(step - warmup_steps_ + scale, scale)));
    }
  }
  return 1;
}

const char* LrSchedule::phase(int64_t step) const {
  if (step < warmup_steps_) return "warmup";
  if (step >= options_.total_steps) return "end";
  switch (type_) {
    case Type::kConstant:
    case Type::kWarmupConstant:
      return "stable";
    case Type::kWarmupStableDecay:
      return step < options_.total_steps - decay_steps_ ? "stable" : "decay";
    default:
      return "decay";
  }
}

std::string LrSchedule::table(double learning_rate, int num_rows) const {
  const int64_t total = options_.total_steps;
  std::set<int64_t> steps = {0, std::min(warmup_steps_, total), total};
  if (type_ == Type::kWarmupStableDecay) steps.insert(total - decay_steps_);
  for (int row = 0; row < num_rows; ++row) {
    steps.insert(total * row / std::max(1, num_rows - 1));
  }
  std::string table = absl::StrFormat("%8s  %-6s  %8s  %10s\n", "step", "phase",
                                      "factor", "rate");
  for (int64_t step : steps) {
    absl::StrAppendFormat(&table, "%8d  %-6s  %8.6f  %10.4e\n", step,
                          phase(step), factor(step),
                          factor(step) * learning_rate);
  }
  return table;
}

}  // namespace fullshard
