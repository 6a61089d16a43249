#ifndef FULLSHARD_DATA_DISTRIBUTED_SAMPLER_H_
#define FULLSHARD_DATA_DISTRIBUTED_SAMPLER_H_

#include <cstdint>
#include <vector>

namespace fullshard {

// Deals the examples of an epoch to the ranks: a permutation from seed + epoch,
// padded from its start to a multiple of the ranks, of which rank r takes
// elements r, r + W, r + 2W and so on. The same indices as
// torch.utils.data.DistributedSampler with shuffle=True.
//
// As ranks take turns, the examples of the first G elements are the same for
// every number of ranks that divides G.
class DistributedSampler {
 public:
  // Requires: num_examples >= 1, 0 <= rank < num_ranks.
  DistributedSampler(int64_t num_examples, int num_ranks, int rank,
                     uint64_t seed)
      : num_examples_(num_examples),
        num_ranks_(num_ranks),
        rank_(rank),
        seed_(seed) {}

  // This rank's examples, equally many on every rank.
  std::vector<int64_t> indices(int64_t epoch) const;

 private:
  const int64_t num_examples_;
  const int num_ranks_;
  const int rank_;
  const uint64_t seed_;
};

}  // namespace fullshard

#endif  // FULLSHARD_DATA_DISTRIBUTED_SAMPLER_H_
