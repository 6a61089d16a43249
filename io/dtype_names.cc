#include "fullshard/io/dtype_names.h"

namespace fullshard {
namespace {

using c10::ScalarType;

constexpr DtypeName kNames[] = {
    {ScalarType::Byte, "uint8", "ByteStorage"},
    {ScalarType::Char, "int8", "CharStorage"},
    {ScalarType::Short, "int16", "ShortStorage"},
    {ScalarType::Int, "int32", "IntStorage"},
    {ScalarType::Long, "int64", "LongStorage"},
    {ScalarType::Half, "float16", "HalfStorage"},
    {ScalarType::Float, "float32", "FloatStorage"},
    {ScalarType::Double, "float64", "DoubleStorage"},
    {ScalarType::ComplexFloat, "complex64", "ComplexFloatStorage"},
    {ScalarType::ComplexDouble, "complex128", "ComplexDoubleStorage"},
    {ScalarType::Bool, "bool", "BoolStorage"},
    {ScalarType::BFloat16, "bfloat16", "BFloat16Storage"},
    {ScalarType::ComplexHalf, "complex32", nullptr},
    {ScalarType::UInt16, "uint16", nullptr},
    {ScalarType::UInt32, "uint32", nullptr},
    {ScalarType::UInt64, "uint64", nullptr},
    {ScalarType::Float8_e5m2, "float8_e5m2", nullptr},
    {ScalarType::Float8_e4m3fn, "float8_e4m3fn", nullptr},
    {ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", nullptr},
    {ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", nullptr},
    {ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", nullptr},
    {ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2", nullptr},
    {ScalarType::Bits1x8, "bits1x8", nullptr},
    {ScalarType::Bits2x4, "bits2x4", nullptr},
    {ScalarType::Bits4x2, "bits4x2", nullptr},
    {ScalarType::Bits8, "bits8", nullptr},
    {ScalarType::Bits16, "bits16", nullptr},
};

}  // namespace

const DtypeName* find_dtype(c10::ScalarType dtype) {
  for (const DtypeName& entry : kNames) {
    if (entry.dtype == dtype) return &entry;
  }
  return nullptr;
}

const DtypeName* find_dtype(absl::string_view name) {
  for (const DtypeName& entry : kNames) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

const DtypeName* find_dtype_of_storage(absl::string_view storage) {
  for (const DtypeName& entry : kNames) {
    if (entry.storage != nullptr && entry.storage == storage) return &entry;
  }
  return nullptr;
}

}  // namespace fullshard
