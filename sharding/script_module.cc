#include "fullshard/sharding/script_module.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "torch/csrc/jit/runtime/graph_executor.h"
#include "torch/csrc/jit/runtime/profiling_graph_executor_impl.h"
#include "torch/csrc/jit/serialization/import.h"

namespace fullshard {
namespace {

// A tied parameter is saved once but loaded as two tensors over one storage;
// sharded, each would get values of its own. Makes them one tensor again.
class TiedParameters {
 public:
  void join(torch::jit::Module& module) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& p = item.value;
      const auto [found, inserted] = by_place_.emplace(
          Place{p.const_data_ptr(), p.sizes().vec(), p.strides().vec()}, p);
      if (!inserted && p.numel() > 0 && !found->second.is_same(p)) {
        module.setattr(item.name, found->second);
      }
    }
    for (const auto& child : module.named_children()) {
      torch::jit::Module inner = child.value;
      join(inner);
    }
  }

 private:
  using Place =
      std::tuple<const void*, std::vector<int64_t>, std::vector<int64_t>>;
  std::map<Place, at::Tensor> by_place_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<ScriptModule>> ScriptModule::load(
    const std::string& path) {
  try {
    torch::jit::Module script = torch::jit::load(path, at::kCPU);
    TiedParameters().join(script);
    return std::make_shared<ScriptModule>(std::move(script));
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    return absl::InvalidArgumentError(absl::StrCat(
        path,
        ": expected a TorchScript module: ", what.substr(0, what.find('\n'))));
  }
}

ScriptModule::ScriptModule(torch::jit::Module script)
    : script_(std::move(script)) {
  torch::jit::setGraphExecutorOptimize(false);
  torch::jit::getProfilingMode() = false;
  torch::jit::getExecutorMode() = false;
  type_ = script_.type()->name()->name();
  for (const auto& item : script_.named_parameters(/*recurse=*/false)) {
    register_parameter(item.name, item.value, item.value.requires_grad());
  }
  for (const auto& item : script_.named_buffers(/*recurse=*/false)) {
    register_buffer(item.name, item.value);
  }
  for (const auto& child : script_.named_children()) {
    register_module(child.name, std::make_shared<ScriptModule>(child.value));
  }
}

c10::IValue ScriptModule::run(const std::string& method,
                              std::vector<c10::IValue> inputs) {
  return script_.get_method(method)(std::move(inputs));
}

void ScriptModule::train(bool on) {
  script_.train(on);
  torch::nn::Module::train(on);
}

WrapPolicy script_type(const std::string& name) {
  return module_if(
      [name](const std::string&, torch::nn::Module& module) {
        const auto* script = dynamic_cast<ScriptModule*>(&module);
        return script != nullptr && script->type() == name;
      },
      "script type " + name);
}

}  // namespace fullshard
