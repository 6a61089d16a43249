#include "fullshard/core/single_backend.h"

#include "ATen/core/grad_mode.h"
#include "fullshard/core/completed_work.h"

namespace fullshard {
namespace {

using c10d::OpType;

c10::intrusive_ptr<c10d::Work> done(OpType operation,
                                    std::vector<at::Tensor> results) {
  return c10::make_intrusive<CompletedWork>(/*rank=*/0, operation,
                                            std::move(results));
}

void copy(const at::Tensor& to, const at::Tensor& from, const char* operation) {
  TORCH_CHECK(
      to.numel() == from.numel() && to.scalar_type() == from.scalar_type(),
      "single ", operation, ": expected ", from.numel(), " ",
      from.scalar_type(), ", got ", to.numel(), " ", to.scalar_type());
  if (to.numel() == 0 || to.is_same(from) ||
      to.const_data_ptr() == from.const_data_ptr()) {
    return;
  }
  at::NoGradGuard no_grad;
  to.view({-1}).copy_(from.reshape({-1}));
}

}  // namespace

c10::intrusive_ptr<c10d::Work> SingleBackend::broadcast(
    std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions&) {
  return done(OpType::BROADCAST, tensors);
}

c10::intrusive_ptr<c10d::Work> SingleBackend::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) {
  return done(OpType::ALLREDUCE, tensors);
}

c10::intrusive_ptr<c10d::Work> SingleBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions&) {
  return done(OpType::ALLREDUCE_COALESCED, tensors);
}

c10::intrusive_ptr<c10d::Work> SingleBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) {
  copy(outputs.at(0).at(0), inputs.at(0), "all_gather");
  return done(OpType::ALLGATHER, outputs[0]);
}

c10::intrusive_ptr<c10d::Work> SingleBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  copy(output, input, "all_gather");
  return done(OpType::_ALLGATHER_BASE, {output});
}

c10::intrusive_ptr<c10d::Work> SingleBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions&) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    copy(outputs.at(i), inputs[i], "all_gather");
  }
  return done(OpType::COALESCED, outputs);
}

c10::intrusive_ptr<c10d::Work> SingleBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions&) {
  copy(outputs.at(0), inputs.at(0).at(0), "reduce_scatter");
  return done(OpType::REDUCE_SCATTER, outputs);
}

c10::intrusive_ptr<c10d::Work> SingleBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions&) {
  copy(output, input, "reduce_scatter");
  return done(OpType::_REDUCE_SCATTER_BASE, {output});
}

c10::intrusive_ptr<c10d::Work> SingleBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions&) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    copy(outputs.at(i), inputs[i], "reduce_scatter");
  }
  return done(OpType::COALESCED, outputs);
}

c10::intrusive_ptr<c10d::Work> SingleBackend::barrier(
    const c10d::BarrierOptions&) {
  return done(OpType::BARRIER, {});
}

}  // namespace fullshard
