#include "fullshard/core/saved_tensor_scope.h"

#include <utility>

#include "c10/core/GradMode.h"

namespace fullshard {

class SavedTensorScope::Hook final : public internal::SavedTensorHook {
 public:
  explicit Hook(std::shared_ptr<const Functions> functions)
      : functions_(std::move(functions)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    at::NoGradGuard no_grad;
    saved_.pack(functions_->pack(tensor.detach()));
  }
  at::Tensor call_unpack_hook() override {
    at::NoGradGuard no_grad;
    return functions_->unpack(saved_.unpack());
  }

 private:
  const std::shared_ptr<const Functions> functions_;
  internal::SavedTensor saved_;
};

SavedTensorScope::SavedTensorScope(Function pack, Function unpack)
    : functions_(std::make_shared<const Functions>(
          Functions{std::move(pack), std::move(unpack)})),
      guard_(this) {
  internal::install_engine();
}

std::unique_ptr<torch::autograd::SavedVariableHooks>
SavedTensorScope::make_hook() {
  return std::make_unique<Hook>(functions_);
}

}  // namespace fullshard
