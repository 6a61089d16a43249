#include "fullshard/precision/mixed_precision.h"

#include <string>

#include "fullshard/core/status.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"

namespace fullshard {
namespace {

absl::Status check_floating(const char* field,
                            std::optional<at::ScalarType> dtype) {
  if (!dtype.has_value() || at::isFloatingType(*dtype)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("mixed_precision.", field,
                   ": expected a floating dtype, got ", at::toString(*dtype)));
}

}  // namespace

bool is_batch_norm(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) ||
         dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module);
}

absl::Status validate(const MixedPrecision& policy) {
  FS_RETURN_IF_ERROR(check_floating("param_dtype", policy.param_dtype));
  FS_RETURN_IF_ERROR(check_floating("reduce_dtype", policy.reduce_dtype));
  FS_RETURN_IF_ERROR(check_floating("buffer_dtype", policy.buffer_dtype));
  return check_floating("output_dtype", policy.output_dtype);
}

at::ScalarType compute_dtype(at::ScalarType storage,
                             std::optional<at::ScalarType> wanted) {
  return wanted.has_value() && at::isFloatingType(storage) ? *wanted : storage;
}

}  // namespace fullshard
