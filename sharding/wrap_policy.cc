#include "fullshard/sharding/wrap_policy.h"

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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
      absl::StrCat("list of ", modules.size(), " modules");
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

WrapPolicy at_least_numel(int64_t min_numel) {
  WrapPolicy policy;
  policy.min_numel_ = std::max<int64_t>(1, min_numel);
  policy.description_ = absl::StrCat("at least ", min_numel, " elements");
  return policy;
}

WrapPolicy any_of(std::vector<WrapPolicy> policies) {
  std::vector<std::string> descriptions;
  int64_t min_numel = 0;
  for (const WrapPolicy& policy : policies) {
    descriptions.push_back(policy.description_);
    if (policy.min_numel_ == 0) continue;
    min_numel = min_numel == 0 ? policy.min_numel_
                               : std::min(min_numel, policy.min_numel_);
  }
  WrapPolicy combined(
      [policies = std::move(policies)](const std::string& name,
                                       torch::nn::Module& module) {
        return std::any_of(policies.begin(), policies.end(),
                           [&](const WrapPolicy& policy) {
                             return policy.matches(name, module);
                           });
      },
      absl::StrCat("any of (", absl::StrJoin(descriptions, ", "), ")"));
  combined.min_numel_ = min_numel;
  return combined;
}

}  // namespace fullshard
