#include "fullshard/core/max_over_ranks.h"

#include <vector>

#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/watchdog.h"

namespace fullshard {

int64_t max_over_ranks(const ProcessGroups& groups, int64_t value,
                       const char* what) {
  if (groups.world_size() == 1) return value;
  std::vector<at::Tensor> tensors = {at::full(
      {1}, value, at::TensorOptions(groups.device()).dtype(at::kLong))};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  CollectiveScope scope(what, nullptr, 0);
  groups.world()->allreduce(tensors, options)->wait();
  return tensors[0].item<int64_t>();
}

absl::Status agree(const ProcessGroups& groups, const absl::Status& status,
                   const std::string& where) {
  const int64_t failed =
      max_over_ranks(groups, status.ok() ? 0 : 1, "all_reduce of a status");
  if (!status.ok() || failed == 0) return status;
  return absl::AbortedError(
      absl::StrCat(where, ": failed on another rank; see its message"));
}

}  // namespace fullshard
