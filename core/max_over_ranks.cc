#include "fullshard/core/max_over_ranks.h"

#include <vector>

#include "ATen/ops/full.h"
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

}  // namespace fullshard
