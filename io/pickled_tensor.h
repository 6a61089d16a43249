#ifndef FULLSHARD_IO_PICKLED_TENSOR_H_
#define FULLSHARD_IO_PICKLED_TENSOR_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fullshard {

// A tensor as a pickle describes it: a strided view of the bytes in the archive
// entry `data/<storage_key>`.
struct PickledTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::string storage_key;
  int64_t storage_bytes = 0;
  int64_t storage_offset = 0;  // in elements
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // in elements
  bool requires_grad = false;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_PICKLED_TENSOR_H_
