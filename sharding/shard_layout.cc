#include "fullshard/sharding/shard_layout.h"

#include <algorithm>
#include <utility>

namespace fullshard {
namespace {

constexpr int64_t kAlignmentBytes = 16;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

ShardLayout ShardLayout::compute(std::vector<int64_t> numels,
                                 int64_t element_size, int num_shards) {
  const int64_t alignment =
      std::max<int64_t>(1, kAlignmentBytes / element_size);
  ShardLayout layout;
  layout.num_shards = num_shards;
  for (int64_t numel : numels) {
    layout.offsets.push_back(round_up(layout.numel, alignment));
    layout.numel = layout.offsets.back() + numel;
  }
  layout.numels = std::move(numels);
  layout.chunk =
      round_up((layout.numel + num_shards - 1) / num_shards, alignment);
  return layout;
}

ShardLayout::Range ShardLayout::local_range(size_t parameter,
                                            int shard_rank) const {
  const int64_t shard_begin = chunk * shard_rank;
  const int64_t begin = std::max(offsets[parameter], shard_begin);
  const int64_t end =
      std::min(offsets[parameter] + numels[parameter], shard_begin + chunk);
  if (begin >= end) return Range{};
  return Range{begin - offsets[parameter], begin - shard_begin, end - begin};
}

}  // namespace fullshard
