#include "fullshard/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace fullshard {
namespace {

constexpr double kPi = 3.14159265358979323846;
constexpr char kConstant[] = "constant";
constexpr char kWarmupCosine[] = "linear-warmup+cosine-decay";

}  // namespace

const std::vector<std::string>& LrSchedule::types() {
  static const auto* const types =
      new std::vector<std::string>{kWarmupCosine, kConstant};
  return *types;
}

absl::StatusOr<LrSchedule> LrSchedule::create(const std::string& type,
                                              int64_t total_steps,
                                              double warmup_ratio) {
  if (std::find(types().begin(), types().end(), type) == types().end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("lr_scheduler_type: expected one of ",
                     absl::StrJoin(types(), ", "), "; got '", type, "'"));
  }
  if (total_steps < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "learning rate schedule: expected 0 or more steps, got ", total_steps));
  }
  if (!(warmup_ratio >= 0 && warmup_ratio <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "warmup_ratio: expected a value from 0 to 1, got ", warmup_ratio));
  }
  LrSchedule schedule;
  schedule.type_ = type;
  schedule.total_steps_ = total_steps;
  if (type != kConstant) {
    schedule.warmup_steps_ =
        static_cast<int64_t>(static_cast<double>(total_steps) * warmup_ratio);
  }
  return schedule;
}

double LrSchedule::factor(int64_t step) const {
  if (type_ == kConstant) return 1;
  if (step == 0) return 0;
  if (step < warmup_steps_) {
    return static_cast<double>(step) /
           static_cast<double>(std::max<int64_t>(1, warmup_steps_));
  }
  const int64_t decayed = std::min(step, total_steps_) - warmup_steps_;
  const double progress =
      static_cast<double>(decayed) /
      static_cast<double>(std::max<int64_t>(1, total_steps_ - warmup_steps_));
  return std::max(0.0, (1 + std::cos(kPi * progress)) / 2);
}

}  // namespace fullshard
