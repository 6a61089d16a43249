#ifndef FULLSHARD_SHARDING_WRAP_POLICY_H_
#define FULLSHARD_SHARDING_WRAP_POLICY_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "torch/nn/module.h"

namespace fullshard {

// Says which modules become units of their own. Copyable; a default one
// matches nothing, so that the whole model is one unit.
class WrapPolicy {
 public:
  using Predicate =
      std::function<bool(const std::string& name, torch::nn::Module& module)>;

  WrapPolicy() = default;
  // `description` appears in messages, as "type BlockImpl".
  WrapPolicy(Predicate predicate, std::string description)
      : predicate_(std::move(predicate)),
        description_(std::move(description)) {}

  bool empty() const { return !predicate_; }
  bool matches(const std::string& name, torch::nn::Module& module) const {
    return predicate_ && predicate_(name, module);
  }
  const std::string& description() const { return description_; }

 private:
  Predicate predicate_;
  std::string description_;
};

namespace internal {
// Returns `type` as C++ spells it.
std::string type_name(const std::type_info& type);
}  // namespace internal

// Matches modules of type M or derived from it. M is the module class itself,
// as torch::nn::LinearImpl.
template <class M>
WrapPolicy module_type() {
  return WrapPolicy(
      [](const std::string&, torch::nn::Module& module) {
        return dynamic_cast<M*>(&module) != nullptr;
      },
      "type " + internal::type_name(typeid(M)));
}

// Matches modules for which `predicate` (name, module) holds.
WrapPolicy module_if(WrapPolicy::Predicate predicate,
                     std::string description = "predicate");

// Matches exactly these modules.
WrapPolicy module_list(std::vector<std::shared_ptr<torch::nn::Module>> modules);

// Matches what any of `policies` matches.
WrapPolicy any_of(std::vector<WrapPolicy> policies);

}  // namespace fullshard

#endif  // FULLSHARD_SHARDING_WRAP_POLICY_H_
