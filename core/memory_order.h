#ifndef FULLSHARD_CORE_MEMORY_ORDER_H_
#define FULLSHARD_CORE_MEMORY_ORDER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fullshard {

// The dimensions of a dense tensor, outermost in memory first: 0, 1, 2, ... of
// a contiguous one. Dimensions of size 1 may be anywhere in memory and keep
// their place.
std::vector<int64_t> memory_order(const std::vector<int64_t>& sizes,
                                  const std::vector<int64_t>& strides);

// The strides of a dense tensor whose memory has that order.
std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes,
                                const std::vector<int64_t>& order);

// Returns the elements of `tensor`, 1-D, in the order of a memory in which its
// dimensions have that one: a view if its own memory does, else a copy.
at::Tensor elements_in_order(const at::Tensor& tensor,
                             const std::vector<int64_t>& order);

}  // namespace fullshard

#endif  // FULLSHARD_CORE_MEMORY_ORDER_H_
