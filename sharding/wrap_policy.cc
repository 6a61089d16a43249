#include "fullshard/sharding/wrap_policy.h"

#include <typeinfo>
#include <utility>

#include "c10/util/Type.h"

namespace fullshard {

namespace internal {
std::string type_name(const std::type_info& type) {
  return c10::demangle(type.name());
}
}  // namespace internal

WrapPolicy module_if(WrapPolicy::Predicate predicate, std::string description) {
  return WrapPolicy(std::move(predicate), std::move(description));
}

WrapPolicy module_list(
    std::vector<std::shared_ptr<torch::nn::Module>> modules) {
  std::string description =
      "list of " + std::to_string(modules.size()) + " modules";
  return WrapPolicy(
      [modules = std::move(modules)](const std::string&,
                                     torch::nn::Module& module) {
        for (const auto& listed : modules) {
          if (listed.get() == &module) return true;
        }
        return false;
      },
      std::move(description));
}

WrapPolicy any_of(std::vector<WrapPolicy> policies) {
  std::string description;
  for (const WrapPolicy& policy : policies) {
    if (!description.empty()) description += ", ";
    description += policy.description();
  }
  return WrapPolicy(
      [policies = std::move(policies)](const std::string& name,
                                       torch::nn::Module& module) {
        for (const WrapPolicy& policy : policies) {
          if (policy.matches(name, module)) return true;
        }
        return false;
      },
      "any of (" + description + ")");
}

}  // namespace fullshard
