#ifndef FULLSHARD_SHARDING_SHARD_LAYOUT_H_
#define FULLSHARD_SHARDING_SHARD_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fullshard {

// Where the parameters of one flat parameter lie, and which part each rank of
// the shard group owns. Pure arithmetic; offsets and sizes are in elements.
//
// Every parameter starts on a 16-byte boundary of the compute dtype. A rank's
// chunk is ceil(numel / num_shards) rounded up to 16 bytes, so that every shard
// starts aligned; ranks own consecutive chunks, the last are short or empty
// and padded with zeros.
struct ShardLayout {
  std::vector<int64_t> numels;   // One per parameter.
  std::vector<int64_t> offsets;  // One per parameter.
  int64_t numel = 0;             // End of the last parameter.
  int64_t chunk = 0;             // Elements per rank.
  int num_shards = 1;

  // Requires: element_size is a power of two, num_shards >= 1.
  static ShardLayout compute(std::vector<int64_t> numels, int64_t element_size,
                             int num_shards);

  // Elements of the gathered flat parameter.
  int64_t padded() const { return chunk * num_shards; }

  // A piece of a parameter that a rank owns.
  struct Range {
    int64_t parameter_offset = 0;  // From the parameter's first element.
    int64_t shard_offset = 0;      // From the shard's first element.
    int64_t numel = 0;             // 0 if the rank owns none of it.
  };
  Range local_range(size_t parameter, int shard_rank) const;
};

}  // namespace fullshard

#endif  // FULLSHARD_SHARDING_SHARD_LAYOUT_H_
