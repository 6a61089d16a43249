#include "fullshard/data/distributed_sampler.h"

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/ops/randperm.h"

namespace fullshard {

std::vector<int64_t> DistributedSampler::indices(int64_t epoch) const {
  const at::Generator generator =
      at::detail::createCPUGenerator(seed_ + static_cast<uint64_t>(epoch));
  const at::Tensor permutation = at::randperm(
      num_examples_, generator, at::TensorOptions().dtype(at::kLong));
  const int64_t* order = permutation.const_data_ptr<int64_t>();
  const int64_t total =
      (num_examples_ + num_ranks_ - 1) / num_ranks_ * num_ranks_;
  std::vector<int64_t> mine;
  for (int64_t i = rank_; i < total; i += num_ranks_) {
    mine.push_back(order[i % num_examples_]);
  }
  return mine;
}

}  // namespace fullshard
