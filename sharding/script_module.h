#ifndef FULLSHARD_SHARDING_SCRIPT_MODULE_H_
#define FULLSHARD_SHARDING_SCRIPT_MODULE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "fullshard/sharding/wrap_policy.h"
#include "torch/csrc/jit/api/module.h"
#include "torch/nn/module.h"

namespace fullshard {

// A TorchScript module, as torch.jit.script or torch.jit.trace saved it, that
// can be sharded, checkpointed and trained like any torch::nn::Module: its tree
// of submodules, parameters and buffers under the names it has in Python.
//
// TorchScript's graph optimiser would replace operators between the dispatcher
// and a sharded parameter; making a ScriptModule switches it off for the whole
// process.
//
// Example:
//   auto model = ScriptModule::load("model.ts").value();
//   ShardOptions options;
//   options.wrap_policy = script_type("Block");  // class Block in Python
//   auto sharded = fully_shard(model, groups, options);
//   (*sharded)(inputs).mean().backward();
class ScriptModule final : public torch::nn::Module {
 public:
  // Errors: kInvalidArgument naming the file if it is none.
  static absl::StatusOr<std::shared_ptr<ScriptModule>> load(
      const std::string& path);
  explicit ScriptModule(torch::jit::Module script);

  // Calls the module's forward, which returns a tensor.
  template <class... Args>
  at::Tensor forward(Args&&... args) {
    return run("forward", {c10::IValue(std::forward<Args>(args))...})
        .toTensor();
  }
  // Calls any method.
  c10::IValue run(const std::string& method, std::vector<c10::IValue> inputs);

  void train(bool on = true) override;

  // Name of the Python class, without its module path.
  const std::string& type() const { return type_; }

 private:
  torch::jit::Module script_;
  std::string type_;
};

// Matches script modules of this Python class.
WrapPolicy script_type(const std::string& name);

}  // namespace fullshard

#endif  // FULLSHARD_SHARDING_SCRIPT_MODULE_H_
