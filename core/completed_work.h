#ifndef FULLSHARD_CORE_COMPLETED_WORK_H_
#define FULLSHARD_CORE_COMPLETED_WORK_H_

#include <utility>
#include <vector>

#include "ATen/core/ivalue.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace fullshard {

// The handle of a collective that was finished before its call returned.
class CompletedWork : public c10d::Work {
 public:
  CompletedWork(int rank, c10d::OpType operation,
                std::vector<at::Tensor> results)
      : c10d::Work(rank, operation), results_(std::move(results)) {}

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(results_);
    return future;
  }

 private:
  std::vector<at::Tensor> results_;
};

}  // namespace fullshard

#endif  // FULLSHARD_CORE_COMPLETED_WORK_H_
