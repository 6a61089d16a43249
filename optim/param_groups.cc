#include "fullshard/optim/param_groups.h"

#include <utility>

#include "absl/strings/match.h"

namespace fullshard {

bool decays_by_default(const std::string& name,
                       const std::vector<int64_t>& original_sizes) {
  return original_sizes.size() > 1 && !absl::EndsWith(name, ".bias");
}

bool decays_always(const std::string& /*name*/,
                   const std::vector<int64_t>& /*original_sizes*/) {
  return true;
}

ParameterPredicate in_module(std::string path) {
  return [prefix = std::move(path) + "."](const std::string& name,
                                          const std::vector<int64_t>&) {
    return absl::StartsWith(name, prefix);
  };
}

}  // namespace fullshard
