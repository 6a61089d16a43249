#ifndef FULLSHARD_CORE_SAVED_TENSOR_SCOPE_H_
#define FULLSHARD_CORE_SAVED_TENSOR_SCOPE_H_

#include <functional>
#include <memory>

#include "fullshard/core/saved_tensor_hooks.h"

namespace fullshard {

// While alive, what autograd saves on this thread goes through `pack`, and what
// that returned comes back through `unpack` in backward: the C++ form of
// torch.autograd.graph.saved_tensors_hooks. (A SavedVariable of LibTorch has
// room for one pair of hooks, and sharding and checkpointing need it.)
//
// The innermost scope or checkpoint() sees a tensor: inside a checkpoint, what
// goes through here is not recomputed; around one, its inputs go through here.
// Both functions are called without gradients, `unpack` on the thread that runs
// backward.
//
// Example:
//   SavedTensorScope to_bf16(
//       [](const at::Tensor& t) { return t.to(at::kBFloat16); },
//       [](const at::Tensor& t) { return t.to(at::kFloat); });
class SavedTensorScope final : internal::HookFactory {
 public:
  using Function = std::function<at::Tensor(const at::Tensor& tensor)>;

  SavedTensorScope(Function pack, Function unpack);
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  struct Functions {
    Function pack, unpack;
  };
  class Hook;

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hook() override;

  const std::shared_ptr<const Functions>
      functions_;  // Hooks outlive the scope.
  const internal::HookFactoryGuard guard_;
};

}  // namespace fullshard

#endif  // FULLSHARD_CORE_SAVED_TENSOR_SCOPE_H_
