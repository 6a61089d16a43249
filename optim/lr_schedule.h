#ifndef FULLSHARD_OPTIM_LR_SCHEDULE_H_
#define FULLSHARD_OPTIM_LR_SCHEDULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace fullshard {

// The factor by which each optimizer step multiplies the learning rate: a pure
// function of the step, so that a run resumes anywhere.
//
// With k the step counted from 0, T total_steps and W warmup_steps:
//   constant                    1
//   linear-warmup+cosine-decay  k / max(1, W)                            k < W
//                               max(0, (1 + cos(pi (k-W)/max(1,T-W)))/2) else
// With warmup the first step uses 0, also when W is 0, as the trainers of the
// Prismatic family do. From T on the factor stays at its end value.
// Source: transformers.get_cosine_schedule_with_warmup.
class LrSchedule {
 public:
  // `warmup_ratio` gives W = int(T ratio); constant has none.
  //
  // Errors: kInvalidArgument for an unknown type (lists the known ones), a
  // negative total or a ratio outside [0, 1].
  static absl::StatusOr<LrSchedule> create(const std::string& type,
                                           int64_t total_steps,
                                           double warmup_ratio);
  static const std::vector<std::string>& types();

  double factor(int64_t step) const;
  int64_t warmup_steps() const { return warmup_steps_; }
  int64_t total_steps() const { return total_steps_; }
  const std::string& type() const { return type_; }

 private:
  std::string type_;
  int64_t total_steps_ = 0;
  int64_t warmup_steps_ = 0;
};

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_LR_SCHEDULE_H_
