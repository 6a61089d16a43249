#ifndef FULLSHARD_CORE_MEMORY_ORDER_H_
#define FULLSHARD_CORE_MEMORY_ORDER_H_

#include <cstdint>
#include <vector>

namespace fullshard {

// The dimensions of a dense tensor, outermost in memory first: 0, 1, 2, ... of
// a contiguous one. Dimensions of size 1 may be anywhere in memory and keep
// their place.
std::vector<int64_t> memory_order(const std::vector<int64_t>& sizes,
                                  const std::vector<int64_t>& strides);

}  // namespace fullshard

#endif  // FULLSHARD_CORE_MEMORY_ORDER_H_
