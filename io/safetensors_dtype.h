#ifndef FULLSHARD_IO_SAFETENSORS_DTYPE_H_
#define FULLSHARD_IO_SAFETENSORS_DTYPE_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"

namespace fullshard {

// A dtype of the safetensors format (safetensors 0.8, tensor.rs).
struct SafetensorsDtype {
  absl::string_view name;  // "BF16"
  int64_t bits;            // of one element, 4 to 64
  // LibTorch's dtype; the 6-bit floats have none.
  std::optional<c10::ScalarType> scalar_type;
};

// Return nullptr for what the format does not have.
const SafetensorsDtype* find_safetensors_dtype(absl::string_view name);
const SafetensorsDtype* find_safetensors_dtype(c10::ScalarType dtype);

// LibTorch packs two 4-bit floats into one element; the format counts each.
// Converts a shape between the two.
// Requires: with F4 towards LibTorch, a last dimension that is even.
std::vector<int64_t> shape_in_file(const SafetensorsDtype& dtype,
                                   std::vector<int64_t> sizes);
std::vector<int64_t> shape_in_memory(const SafetensorsDtype& dtype,
                                     std::vector<int64_t> shape);

// Returns the bytes of a tensor of `shape` as the format counts it.
// Nullopt: more than 63 bits, or an end inside a byte.
std::optional<int64_t> safetensors_bytes(const SafetensorsDtype& dtype,
                                         const std::vector<int64_t>& shape);

}  // namespace fullshard

#endif  // FULLSHARD_IO_SAFETENSORS_DTYPE_H_
