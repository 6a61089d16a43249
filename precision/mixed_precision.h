#ifndef FULLSHARD_PRECISION_MIXED_PRECISION_H_
#define FULLSHARD_PRECISION_MIXED_PRECISION_H_

#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "c10/core/ScalarType.h"
#include "fullshard/core/tensor_tree.h"

namespace torch::nn {
class Module;
}

namespace fullshard {

// Returns whether `module` is a BatchNorm of any rank: its running statistics
// lose too much in half precision.
bool is_batch_norm(const torch::nn::Module& module);

// Which dtype each part of training uses. An unset field means: as it is.
struct MixedPrecision {
  // Dtype in which floating parameters are gathered and computed with. The
  // master shard keeps the parameter's own dtype.
  std::optional<at::ScalarType> param_dtype;
  // Dtype in which gradients are reduced. Default: param_dtype.
  std::optional<at::ScalarType> reduce_dtype;
  // Keep gradient shards in the reduce dtype where that is smaller than the
  // master's, for less memory. Micro-batches then add up in that dtype.
  bool keep_low_precision_grads = false;
  // Dtype of floating buffers in forward. A state dict keeps their values in
  // the original dtype.
  std::optional<at::ScalarType> buffer_dtype;
  // Dtype to which floating outputs of the root's forward are cast.
  std::optional<at::ScalarType> output_dtype;
  // Cast floating inputs of the root's forward to param_dtype.
  bool cast_forward_inputs = true;
  // Without gradients, and while the module is in eval mode, compute as if the
  // policy said nothing. To change over, units are laid out in memory anew.
  bool full_precision_in_eval = false;
  // Modules whose own parameters and buffers stay as they are.
  std::function<bool(const torch::nn::Module&)> keep_full_precision =
      is_batch_norm;
};

// Errors: kInvalidArgument naming the field if a dtype is not floating.
absl::Status validate(const MixedPrecision& policy);

// Returns the dtype in which a parameter or buffer stored as `storage` is
// computed with under `wanted`: only real floating tensors are cast.
at::ScalarType compute_dtype(at::ScalarType storage,
                             std::optional<at::ScalarType> wanted);

// Casts every floating tensor inside `value` (see core/tensor_tree.h) to
// `dtype`; everything else, and an unset dtype, leaves it alone.
template <class T>
void cast_floating(T& value, std::optional<at::ScalarType> dtype) {
  if (!dtype.has_value()) return;
  auto cast = [&](at::Tensor& tensor) {
    if (tensor.defined() && at::isFloatingType(tensor.scalar_type()) &&
        tensor.scalar_type() != *dtype) {
      tensor = tensor.to(*dtype);
    }
  };
  internal::visit_tensors(value, cast);
}

}  // namespace fullshard

#endif  // FULLSHARD_PRECISION_MIXED_PRECISION_H_
