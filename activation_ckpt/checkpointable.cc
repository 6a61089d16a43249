#include "fullshard/activation_ckpt/checkpointable.h"

#include <typeinfo>
#include <vector>

#include "absl/strings/str_cat.h"
#include "c10/util/Type.h"
#include "torch/nn/module.h"

namespace fullshard {

absl::StatusOr<int> apply_activation_checkpointing(
    torch::nn::Module& root,
    const std::function<bool(const std::string& name,
                             torch::nn::Module& module)>& predicate) {
  std::vector<CheckpointSwitch*> switches;
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
    switches.push_back(found);
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
  for (CheckpointSwitch* found : switches) {
    found->set_activation_checkpointing(true);
  }
  return static_cast<int>(switches.size());
}

}  // namespace fullshard
