#include "fullshard/data/distributed_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace fullshard {
namespace {

using testing::ElementsAre;

// The expected numbers are what torch.utils.data.DistributedSampler of PyTorch
// 2.11 gives.
TEST(DistributedSamplerTest, DealsAsPyTorchDoes) {
  EXPECT_THAT(DistributedSampler(10, 3, 0, /*seed=*/7).indices(2),
              ElementsAre(0, 7, 9, 3));
  EXPECT_THAT(DistributedSampler(10, 3, 1, /*seed=*/7).indices(2),
              ElementsAre(5, 6, 1, 0));
  EXPECT_THAT(DistributedSampler(10, 3, 2, /*seed=*/7).indices(2),
              ElementsAre(8, 2, 4, 5));
}

TEST(DistributedSamplerTest, RepeatsExamplesWhereRanksAreMoreThanExamples) {
  std::vector<int64_t> dealt;
  for (int rank = 0; rank < 4; ++rank) {
    const auto mine = DistributedSampler(3, 4, rank, /*seed=*/0).indices(0);
    ASSERT_EQ(mine.size(), 1u);
    dealt.push_back(mine[0]);
  }
  EXPECT_THAT(dealt, ElementsAre(2, 0, 1, 2));
}

TEST(DistributedSamplerTest, RanksTogetherSeeEveryExampleOnce) {
  std::vector<int64_t> seen;
  for (int rank = 0; rank < 4; ++rank) {
    const auto mine = DistributedSampler(100, 4, rank, /*seed=*/7).indices(0);
    seen.insert(seen.end(), mine.begin(), mine.end());
  }
  std::sort(seen.begin(), seen.end());
  std::vector<int64_t> all(100);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(seen, all);
}

TEST(DistributedSamplerTest, GlobalBatchesAreTheSameForEveryNumberOfRanks) {
  constexpr int64_t kGlobalBatch = 12;
  std::vector<std::vector<int64_t>> of_one_rank;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    std::vector<std::vector<int64_t>> batches(5);
    for (int rank = 0; rank < ranks; ++rank) {
      const auto mine =
          DistributedSampler(61, ranks, rank, /*seed=*/3).indices(1);
      for (size_t batch = 0; batch < batches.size(); ++batch) {
        const auto begin = mine.begin() + batch * kGlobalBatch / ranks;
        batches[batch].insert(batches[batch].end(), begin,
                              begin + kGlobalBatch / ranks);
      }
    }
    for (auto& batch : batches) std::sort(batch.begin(), batch.end());
    if (ranks == 1) of_one_rank = batches;
    EXPECT_EQ(batches, of_one_rank) << ranks << " ranks";
  }
}

TEST(DistributedSamplerTest, OrderDependsOnSeedAndEpoch) {
  const DistributedSampler sampler(50, 1, 0, /*seed=*/7);
  EXPECT_EQ(sampler.indices(3), sampler.indices(3));
  EXPECT_NE(sampler.indices(3), sampler.indices(4));
  EXPECT_EQ(sampler.indices(3),
            DistributedSampler(50, 1, 0, /*seed=*/10).indices(0));
}

}  // namespace
}  // namespace fullshard
