#include "fullshard/core/fake_backend.h"

#include "ATen/core/grad_mode.h"
#include "fullshard/core/completed_work.h"

namespace fullshard {
namespace {

using c10d::OpType;
using c10d::ReduceOp;

c10::intrusive_ptr<c10d::Work> done(int rank, OpType operation,
                                    std::vector<at::Tensor> results) {
  return c10::make_intrusive<CompletedWork>(rank, operation,
                                            std::move(results));
}

void check_numel(const char* operation, int64_t got, int64_t expected) {
  TORCH_CHECK(got == expected, "fake ", operation, ": expected ", expected,
              " elements, got ", got);
}

// What `count` equal tensors reduce to.
void reduce_equal(const at::Tensor& tensor, int count, const ReduceOp& op) {
  at::NoGradGuard no_grad;
  if (op == ReduceOp::SUM) tensor.mul_(count);
}

void gather_one(const at::Tensor& output, const at::Tensor& input, int size) {
  check_numel("all_gather", output.numel(), input.numel() * size);
  at::NoGradGuard no_grad;
  const at::Tensor source = input.reshape({-1});
  for (const at::Tensor& chunk : output.view({-1}).chunk(size)) {
    // The input may be a part of the output.
    if (chunk.const_data_ptr() != source.const_data_ptr()) chunk.copy_(source);
  }
}

void reduce_scatter_one(const at::Tensor& output, const at::Tensor& input,
                        int size, const ReduceOp& op) {
  check_numel("reduce_scatter", output.numel(), input.numel());
  at::NoGradGuard no_grad;
  output.view({-1}).copy_(input.reshape({-1}));
  reduce_equal(output, size, op);
}

at::Tensor chunk_of(const at::Tensor& input, int rank, int size) {
  check_numel("reduce_scatter", input.numel() % size, 0);
  return input.reshape({size, -1}).select(0, rank);
}

}  // namespace

c10::intrusive_ptr<c10d::Work> FakeBackend::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  for (const at::Tensor& t : tensors) reduce_equal(t, size_, options.reduceOp);
  return done(rank_, OpType::ALLREDUCE, tensors);
}

c10::intrusive_ptr<c10d::Work> FakeBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceCoalescedOptions& options) {
  for (const at::Tensor& t : tensors) reduce_equal(t, size_, options.reduceOp);
  return done(rank_, OpType::ALLREDUCE_COALESCED, tensors);
}

c10::intrusive_ptr<c10d::Work> FakeBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) {
  for (const at::Tensor& output : outputs.at(0)) {
    gather_one(output, inputs.at(0), 1);
  }
  return done(rank_, OpType::ALLGATHER, outputs[0]);
}

c10::intrusive_ptr<c10d::Work> FakeBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  gather_one(output, input, size_);
  return done(rank_, OpType::_ALLGATHER_BASE, {output});
}

c10::intrusive_ptr<c10d::Work> FakeBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions&) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    gather_one(outputs.at(i), inputs[i], size_);
  }
  return done(rank_, OpType::COALESCED, outputs);
}

c10::intrusive_ptr<c10d::Work> FakeBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& options) {
  reduce_scatter_one(outputs.at(0), inputs.at(0).at(static_cast<size_t>(rank_)),
                     size_, options.reduceOp);
  return done(rank_, OpType::REDUCE_SCATTER, outputs);
}

c10::intrusive_ptr<c10d::Work> FakeBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  reduce_scatter_one(output, chunk_of(input, rank_, size_), size_,
                     options.reduceOp);
  return done(rank_, OpType::_REDUCE_SCATTER_BASE, {output});
}

c10::intrusive_ptr<c10d::Work> FakeBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& options) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    reduce_scatter_one(outputs.at(i), chunk_of(inputs[i], rank_, size_), size_,
                       options.reduceOp);
  }
  return done(rank_, OpType::COALESCED, outputs);
}

}  // namespace fullshard
