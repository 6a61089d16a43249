#ifndef FULLSHARD_IO_DTYPE_NAMES_H_
#define FULLSHARD_IO_DTYPE_NAMES_H_

#include <c10/core/ScalarType.h>

#include "absl/strings/string_view.h"

namespace fullshard {

// How Python's torch writes an element type into a checkpoint.
struct DtypeName {
  c10::ScalarType dtype;
  const char* name;     // "float32"
  const char* storage;  // "FloatStorage"; null: stored as bytes with a dtype
};

// Returns nullptr for the types that no checkpoint holds (quantized, ...).
const DtypeName* find_dtype(c10::ScalarType dtype);
const DtypeName* find_dtype(absl::string_view name);
const DtypeName* find_dtype_of_storage(absl::string_view storage);

}  // namespace fullshard

#endif  // FULLSHARD_IO_DTYPE_NAMES_H_
