#include "fullshard/core/memory_order.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace fullshard {

std::vector<int64_t> memory_order(const std::vector<int64_t>& sizes,
                                  const std::vector<int64_t>& strides) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  int64_t last = -1;
  bool row_major = true;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 1) continue;
    row_major = row_major && strides[i] >= last;
    last = strides[i];
  }
  if (row_major) return order;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return strides[static_cast<size_t>(a)] > strides[static_cast<size_t>(b)];
  });
  return order;
}

std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes,
                                const std::vector<int64_t>& order) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const auto dim = static_cast<size_t>(order[i]);
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

at::Tensor elements_in_order(const at::Tensor& tensor,
                             const std::vector<int64_t>& order) {
  return tensor.permute(order).reshape({-1});
}

}  // namespace fullshard
