#ifndef FULLSHARD_TESTS_TESTING_COUNTING_BACKEND_H_
#define FULLSHARD_TESTS_TESTING_COUNTING_BACKEND_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace fullshard {
namespace testing {

// Passes collectives on to another backend and counts them.
//
// It is no ShmBackend, so whatever runs on it takes the path that all backends
// have in common.
class CountingBackend : public c10d::Backend {
 public:
  struct Count {
    int64_t num_calls = 0;
    int64_t num_bytes = 0;  // of the inputs of this rank
  };

  explicit CountingBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  // One of all_gather, reduce_scatter, all_reduce, broadcast, barrier.
  Count count(const std::string& operation) const {
    auto found = counts_.find(operation);
    return found == counts_.end() ? Count() : found->second;
  }
  void reset() { counts_.clear(); }

  const std::string getBackendName() const override {
    return inner_->getBackendName();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    inner_->setTimeout(timeout);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options = {}) override {
    add("broadcast", tensors.at(0));
    return inner_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options = {}) override {
    add("all_reduce", tensors.at(0));
    return inner_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options = {}) override {
    add("all_gather", inputs.at(0));
    return inner_->allgather(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options = {}) override {
    add("all_gather", input);
    return inner_->_allgather_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options = {}) override {
    Count& count = counts_["reduce_scatter"];
    ++count.num_calls;
    for (const at::Tensor& input : inputs.at(0)) {
      count.num_bytes += static_cast<int64_t>(input.nbytes());
    }
    return inner_->reduce_scatter(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options = {}) override {
    add("reduce_scatter", input);
    return inner_->_reduce_scatter_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& options = {}) override {
    ++counts_["barrier"].num_calls;
    return inner_->barrier(options);
  }

 private:
  void add(const std::string& operation, const at::Tensor& input) {
    Count& count = counts_[operation];
    ++count.num_calls;
    count.num_bytes += static_cast<int64_t>(input.nbytes());
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::map<std::string, Count> counts_;
};

}  // namespace testing
}  // namespace fullshard

#endif  // FULLSHARD_TESTS_TESTING_COUNTING_BACKEND_H_
