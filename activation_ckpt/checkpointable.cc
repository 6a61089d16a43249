#include "fullshard/activation_ckpt/checkpointable.h"

#include <typeinfo>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "c10/util/Type.h"
#include "torch/nn/module.h"

namespace fullshard {

absl::StatusOr<int> apply_activation_checkpointing(
    torch::nn::Module& root, const ModulePredicate& predicate,
    const CheckpointOptions& options) {
  std::vector<std::pair<std::string, CheckpointSwitch*>> switches;
  absl::Status status;
  auto visit = [&](const std::string& name, torch::nn::Module& module) {
    if (!status.ok() || !predicate(name, module)) return;
    auto* found = dynamic_cast<CheckpointSwitch*>(&module);
    if (found == nullptr) {
      status = absl::InvalidArgumentError(absl::StrCat(
          "module '", name, "' of type ", c10::demangle(typeid(module).name()),
          " is selected for activation checkpointing but is not "
          "Checkpointable; derive it from Checkpointable or call "
          "checkpoint()"));
      return;
    }
    switches.emplace_back(name, found);
  };
  visit("", root);
  for (const auto& item :
       root.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    visit(item.key(), *item.value());
  }
  if (!status.ok()) return status;
  if (switches.empty()) {
    return absl::InvalidArgumentError(
        "activation checkpointing: no module matches");
  }
  for (const auto& [name, found] : switches) {
    CheckpointOptions own = options;
    own.name = name;
    found->set_activation_checkpointing(true, std::move(own));
  }
  return static_cast<int>(switches.size());
}

ModulePredicate every_kth(int k, ModulePredicate predicate) {
  TORCH_CHECK(k >= 1, "every_kth: expected a k of at least 1, got ", k);
  return [k, predicate = std::move(predicate), seen = 0](
             const std::string& name, torch::nn::Module& module) mutable {
    return predicate(name, module) && seen++ % k == 0;
  };
}

}  // namespace fullshard
