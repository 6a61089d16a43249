// Steps beside ranks that still have batches; [Note: Uneven inputs].

#include "ATen/ops/zeros.h"
#include "c10/core/GradMode.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard::internal {

ShardedState::Work ShardedState::announce(bool at_work) {
  if (groups_.world_size() == 1) {
    return {at_work, gradient_sync_, all_reduce_};
  }
  at::Tensor flags = at::zeros({3}, at::kLong);
  int64_t* own = flags.data_ptr<int64_t>();
  if (at_work) {
    own[0] = 1;
    own[1] = gradient_sync_ ? 1 : 0;
    own[2] = all_reduce_ ? 1 : 0;
  }
  std::vector<at::Tensor> tensors = {flags.to(groups_.device())};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  CollectiveScope scope("all_reduce of who has batches (join)", nullptr, 0);
  groups_.world()->allreduce(tensors, options)->wait();
  const at::Tensor all = tensors[0].cpu();
  const int64_t* any = all.const_data_ptr<int64_t>();
  return {any[0] != 0, any[1] != 0, any[2] != 0};
}

bool ShardedState::shadow_step(bool* reduced) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const Work work = announce(/*at_work=*/false);
  *reduced = work.any_at_work && work.gradient_sync;
  if (!work.any_at_work) return false;
  TORCH_CHECK(order_.complete() || !gathers_communicate_, "join: rank ",
              groups_.rank(),
              " has run fewer than two steps, so it does not know in which "
              "order the others use the units; give every rank two batches");
  at::AutoGradMode as_in_training(true);
  const bool sync_before = gradient_sync_, all_reduce_before = all_reduce_;
  gradient_sync_ = work.gradient_sync;
  set_requires_all_reduce(work.all_reduce);
  shadowing_ = true;
  begin_forward();
  end_forward();
  take_part_in_rest();
  prefetcher_.begin(Prefetcher::kBackward);
  order_.begin();
  sink_ran_ = touched_ = true;
  after_backward(/*ok=*/true);
  shadowing_ = false;
  gradient_sync_ = sync_before;
  set_requires_all_reduce(all_reduce_before);
  return true;
}

}  // namespace fullshard::internal
