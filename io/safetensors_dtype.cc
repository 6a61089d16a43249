#include "fullshard/io/safetensors_dtype.h"

namespace fullshard {
namespace {

using c10::ScalarType;

constexpr SafetensorsDtype kDtypes[] = {
    {"BOOL", 8, ScalarType::Bool},
    {"F4", 4, ScalarType::Float4_e2m1fn_x2},
    {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt},
    {"U8", 8, ScalarType::Byte},
    {"I8", 8, ScalarType::Char},
    {"F8_E5M2", 8, ScalarType::Float8_e5m2},
    {"F8_E4M3", 8, ScalarType::Float8_e4m3fn},
    {"F8_E8M0", 8, ScalarType::Float8_e8m0fnu},
    {"F8_E4M3FNUZ", 8, ScalarType::Float8_e4m3fnuz},
    {"F8_E5M2FNUZ", 8, ScalarType::Float8_e5m2fnuz},
    {"I16", 16, ScalarType::Short},
    {"U16", 16, ScalarType::UInt16},
    {"F16", 16, ScalarType::Half},
    {"BF16", 16, ScalarType::BFloat16},
    {"I32", 32, ScalarType::Int},
    {"U32", 32, ScalarType::UInt32},
    {"F32", 32, ScalarType::Float},
    {"C64", 64, ScalarType::ComplexFloat},
    {"F64", 64, ScalarType::Double},
    {"I64", 64, ScalarType::Long},
    {"U64", 64, ScalarType::UInt64},
};

bool is_packed(const SafetensorsDtype& dtype) {
  return dtype.scalar_type == ScalarType::Float4_e2m1fn_x2;
}

}  // namespace

const SafetensorsDtype* find_safetensors_dtype(absl::string_view name) {
  for (const SafetensorsDtype& dtype : kDtypes) {
    if (dtype.name == name) return &dtype;
  }
  return nullptr;
}

const SafetensorsDtype* find_safetensors_dtype(ScalarType scalar_type) {
  for (const SafetensorsDtype& dtype : kDtypes) {
    if (dtype.scalar_type == scalar_type) return &dtype;
  }
  return nullptr;
}

std::vector<int64_t> shape_in_file(const SafetensorsDtype& dtype,
                                   std::vector<int64_t> sizes) {
  if (is_packed(dtype)) {
    if (sizes.empty()) sizes.push_back(1);
    sizes.back() *= 2;
  }
  return sizes;
}

std::vector<int64_t> shape_in_memory(const SafetensorsDtype& dtype,
                                     std::vector<int64_t> shape) {
  if (is_packed(dtype) && !shape.empty()) shape.back() /= 2;
  return shape;
}

std::optional<int64_t> safetensors_bytes(const SafetensorsDtype& dtype,
                                         const std::vector<int64_t>& shape) {
  int64_t bits = dtype.bits;
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(bits, size, &bits)) return std::nullopt;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

}  // namespace fullshard
