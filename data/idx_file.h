#ifndef FULLSHARD_DATA_IDX_FILE_H_
#define FULLSHARD_DATA_IDX_FILE_H_

#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fullshard {

// Reads a gzipped IDX file of bytes (the MNIST format) from memory; returns a
// uint8 tensor of the file's shape. `name` appears in messages.
//
// Errors: kDataLoss for anything that is not a whole such file.
absl::StatusOr<at::Tensor> read_idx_gz(absl::string_view gzipped,
                                       const std::string& name);

}  // namespace fullshard

#endif  // FULLSHARD_DATA_IDX_FILE_H_
