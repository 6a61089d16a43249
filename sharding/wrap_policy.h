#ifndef FULLSHARD_SHARDING_WRAP_POLICY_H_
#define FULLSHARD_SHARDING_WRAP_POLICY_H_

#include <cstdint>
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

  bool empty() const { return !predicate_ && min_numel_ == 0; }
  bool matches(const std::string& name, torch::nn::Module& module) const {
    return predicate_ && predicate_(name, module);
  }
  // 0: size does not matter.
  int64_t min_numel() const { return min_numel_; }
  const std::string& description() const { return description_; }

 private:
  friend WrapPolicy at_least_numel(int64_t min_numel);
  friend WrapPolicy any_of(std::vector<WrapPolicy> policies);

  Predicate predicate_;
  int64_t min_numel_ = 0;
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

// Matches modules that hold at least `min_numel` parameter elements, not
// counting those of units below them. Containers (ModuleList, ModuleDict) never
// match: their children run one by one.
WrapPolicy at_least_numel(int64_t min_numel);

// Matches what any of `policies` matches.
WrapPolicy any_of(std::vector<WrapPolicy> policies);

}  // namespace fullshard

#endif  // FULLSHARD_SHARDING_WRAP_POLICY_H_
