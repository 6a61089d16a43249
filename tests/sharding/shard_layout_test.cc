#include "fullshard/sharding/shard_layout.h"

#include "gtest/gtest.h"

namespace fullshard {
namespace {

using Offsets = std::vector<int64_t>;

TEST(ShardLayoutTest, AlignsParametersAndChunksTo16BytesInFp32) {
  const ShardLayout layout = ShardLayout::compute({21, 35, 25}, 4, 2);
  EXPECT_EQ(layout.offsets, (Offsets{0, 24, 60}));
  EXPECT_EQ(layout.numel, 85);
  EXPECT_EQ(layout.chunk, 44);
  EXPECT_EQ(layout.padded(), 88);
}

TEST(ShardLayoutTest, AlignsParametersAndChunksTo16BytesInBf16) {
  const ShardLayout layout = ShardLayout::compute({21, 35, 25}, 2, 2);
  EXPECT_EQ(layout.offsets, (Offsets{0, 24, 64}));
  EXPECT_EQ(layout.numel, 89);
  EXPECT_EQ(layout.chunk, 48);
  EXPECT_EQ(layout.padded(), 96);
}

TEST(ShardLayoutTest, LastRanksAreShort) {
  const ShardLayout layout = ShardLayout::compute({30}, 4, 4);
  Offsets numels;
  for (int rank = 0; rank < 4; ++rank) {
    numels.push_back(layout.local_range(0, rank).numel);
  }
  EXPECT_EQ(numels, (Offsets{8, 8, 8, 6}));
}

TEST(ShardLayoutTest, RanksMayOwnNothing) {
  const ShardLayout layout = ShardLayout::compute({3}, 4, 4);
  EXPECT_EQ(layout.local_range(0, 0).numel, 3);
  for (int rank = 1; rank < 4; ++rank) {
    EXPECT_EQ(layout.local_range(0, rank).numel, 0);
  }
}

TEST(ShardLayoutTest, EveryElementHasOneOwner) {
  for (int num_shards : {1, 2, 3, 4, 7, 8}) {
    const ShardLayout layout =
        ShardLayout::compute({1, 0, 17 * 17, 5, 12, 64}, 4, num_shards);
    for (size_t i = 0; i < layout.numels.size(); ++i) {
      int64_t next = 0;
      for (int rank = 0; rank < num_shards; ++rank) {
        const ShardLayout::Range range = layout.local_range(i, rank);
        if (range.numel == 0) continue;
        EXPECT_EQ(range.parameter_offset, next);
        EXPECT_EQ(rank * layout.chunk + range.shard_offset,
                  layout.offsets[i] + next);
        next += range.numel;
      }
      EXPECT_EQ(next, layout.numels[i]) << num_shards << " shards";
    }
  }
}

TEST(ShardLayoutTest, PaddingOfALargeModelIsSmall) {
  // 1.2 B parameters in blocks of 50 M, over 4,096 ranks.
  const ShardLayout layout = ShardLayout::compute({50000001}, 2, 4096);
  EXPECT_LT(layout.padded() - layout.numel, layout.numel / 1000);
}

}  // namespace
}  // namespace fullshard
