#ifndef FULLSHARD_TESTS_IO_TENSORS_H_
#define FULLSHARD_TESTS_IO_TENSORS_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <string>
#include <vector>

namespace fullshard {

// Every dtype that a checkpoint can hold and a plain `empty` can make.
inline const std::vector<c10::ScalarType>& all_dtypes() {
  using c10::ScalarType;
  static const std::vector<ScalarType> dtypes = {ScalarType::Byte,
                                                 ScalarType::Char,
                                                 ScalarType::Short,
                                                 ScalarType::Int,
                                                 ScalarType::Long,
                                                 ScalarType::Half,
                                                 ScalarType::Float,
                                                 ScalarType::Double,
                                                 ScalarType::ComplexHalf,
                                                 ScalarType::ComplexFloat,
                                                 ScalarType::ComplexDouble,
                                                 ScalarType::Bool,
                                                 ScalarType::BFloat16,
                                                 ScalarType::UInt16,
                                                 ScalarType::UInt32,
                                                 ScalarType::UInt64,
                                                 ScalarType::Float8_e5m2,
                                                 ScalarType::Float8_e4m3fn,
                                                 ScalarType::Float8_e5m2fnuz,
                                                 ScalarType::Float8_e4m3fnuz,
                                                 ScalarType::Float8_e8m0fnu,
                                                 ScalarType::Float4_e2m1fn_x2,
                                                 ScalarType::Bits1x8,
                                                 ScalarType::Bits2x4,
                                                 ScalarType::Bits4x2,
                                                 ScalarType::Bits8,
                                                 ScalarType::Bits16};
  return dtypes;
}

// A contiguous tensor whose bytes follow from `seed`.
inline at::Tensor make_tensor(c10::ScalarType dtype, std::vector<int64_t> sizes,
                              unsigned seed = 1) {
  at::Tensor tensor = at::empty(sizes, at::TensorOptions().dtype(dtype));
  auto* bytes = static_cast<unsigned char*>(tensor.data_ptr());
  const bool is_bool = dtype == c10::ScalarType::Bool;
  for (size_t i = 0; i < tensor.nbytes(); ++i) {
    seed = seed * 1664525u + 1013904223u;
    bytes[i] =
        static_cast<unsigned char>(is_bool ? (seed >> 24) & 1 : seed >> 24);
  }
  return tensor;
}

// The elements' bytes in row-major order, whatever the strides.
inline std::string logical_bytes(const at::Tensor& tensor) {
  const auto element = static_cast<int64_t>(tensor.element_size());
  const auto* base = static_cast<const char*>(tensor.const_data_ptr());
  std::string out;
  std::vector<int64_t> index(static_cast<size_t>(tensor.dim()), 0);
  for (int64_t n = 0; n < tensor.numel(); ++n) {
    int64_t offset = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      offset += index[static_cast<size_t>(d)] * tensor.stride(d);
    }
    out.append(base + offset * element, static_cast<size_t>(element));
    for (int64_t d = tensor.dim(); d-- > 0;) {
      if (++index[static_cast<size_t>(d)] < tensor.size(d)) break;
      index[static_cast<size_t>(d)] = 0;
    }
  }
  return out;
}

inline bool bit_equal(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         logical_bytes(a) == logical_bytes(b);
}

}  // namespace fullshard

#endif  // FULLSHARD_TESTS_IO_TENSORS_H_
