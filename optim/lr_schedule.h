#ifndef FULLSHARD_OPTIM_LR_SCHEDULE_H_
#define FULLSHARD_OPTIM_LR_SCHEDULE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace fullshard {

struct LrScheduleOptions {
  // One of LrSchedule::types().
  std::string type = "linear-warmup+cosine-decay";
  int64_t total_steps = 0;
  // Warmup takes int(total_steps warmup_ratio) steps, or exactly warmup_steps
  // if given. `constant` has none.
  double warmup_ratio = 0;
  std::optional<int64_t> warmup_steps;
  // The factor at which a decay ends, from 0 to 1.
  double min_lr_ratio = 0;
  // Of warmup-stable-decay: the part of total_steps that decays, and how:
  // linear, cosine or 1-sqrt.
  double decay_ratio = 0.1;
  std::string decay_shape = "cosine";
};

// The factor by which each optimizer step multiplies the learning rate: a pure
// function of the step, so that a run resumes anywhere.
//
// With k the step counted from 0, T total_steps, W warmup steps, D decay steps
// and m min_lr_ratio, the factor is k / max(1, W) for k < W, and then
//   constant                    1 (W is 0)
//   linear-warmup+constant      1
//   linear-warmup+cosine-decay  max(0, m + (1-m) (1 + cos(pi x))/2),
//                               x = (k-W)/max(1, T-W)
//   warmup-stable-decay         1 until T-D, then m + (1-m) f(y),
//                               y = (k-T+D)/D; warmup goes from m to 1
//   inverse-square-root         max(m, sqrt(S/(k-W+S))), S = W or, without
//                               warmup, 10,000
// f is 1-y (linear), (1 + cos(pi y))/2 (cosine) or 1-sqrt(y) (1-sqrt).
// The first step of linear-warmup+cosine-decay uses 0, also when W is 0, as the
// trainers of the Prismatic family do. From T on the factor stays at its end
// value.
// Source: transformers.get_{constant,cosine,cosine_with_min_lr,inverse_sqrt,
// wsd}_schedule*.
class LrSchedule {
 public:
  // Errors: kInvalidArgument for an unknown type or shape (lists the known
  // ones), counts or ratios out of range, warmup and decay that do not fit into
  // total_steps, or a min_lr_ratio for a type that does not decay.
  static absl::StatusOr<LrSchedule> create(const LrScheduleOptions& options);
  // The same with a warmup ratio alone.
  static absl::StatusOr<LrSchedule> create(const std::string& type,
                                           int64_t total_steps,
                                           double warmup_ratio);
  static const std::vector<std::string>& types();

  double factor(int64_t step) const;
  int64_t warmup_steps() const { return warmup_steps_; }
  int64_t decay_steps() const { return decay_steps_; }
  int64_t total_steps() const { return options_.total_steps; }
  const std::string& type() const { return options_.type; }

  // "warmup", "stable", "decay" or, from step T on, "end".
  const char* phase(int64_t step) const;

  // A table of the rates at about `num_rows` steps, evenly spread, with the
  // first step of each phase and step T among them:
  //     step  phase   factor          rate
  //        0  warmup  0.000000  0.0000e+00
  std::string table(double learning_rate, int num_rows = 12) const;

 private:
  enum class Type {
    kWarmupCosine,
    kConstant,
    kWarmupConstant,
    kWarmupStableDecay,
    kInverseSquareRoot,
  };

  double decayed(double progress) const;

  LrScheduleOptions options_;
  Type type_ = Type::kConstant;
  int64_t warmup_steps_ = 0;
  int64_t decay_steps_ = 0;
};

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_LR_SCHEDULE_H_
