#ifndef FULLSHARD_ACTIVATION_CKPT_KEPT_OPERATORS_H_
#define FULLSHARD_ACTIVATION_CKPT_KEPT_OPERATORS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace c10 {
class OperatorHandle;
struct FunctionSchema;
}  // namespace c10

namespace fullshard {

// The operators whose outputs selective checkpointing keeps; see
// CheckpointOptions::keep. Immutable.
class KeptOperators {
 public:
  // Names as the dispatcher has them, below autograd: "aten::mm",
  // "aten::add.Tensor". Operators that draw random numbers are recomputed all
  // the same, or the generators would fall out of step.
  //
  // Errors: kNotFound for an operator that does not exist, kInvalidArgument
  // for one that writes to its arguments or returns views of them.
  static absl::StatusOr<std::shared_ptr<const KeptOperators>> create(
      const std::vector<std::string>& names);

  bool contains(const c10::OperatorHandle& op) const;

 private:
  KeptOperators() = default;

  std::vector<const c10::FunctionSchema*> schemas_;
};

// Matrix products, convolutions and fused attention: most of the arithmetic of
// a transformer, and few of its bytes.
std::shared_ptr<const KeptOperators> matmuls_and_attention();

}  // namespace fullshard

#endif  // FULLSHARD_ACTIVATION_CKPT_KEPT_OPERATORS_H_
