#include "fullshard/optim/param_groups.h"

#include "absl/strings/match.h"

namespace fullshard {

bool decays_by_default(const std::string& name,
                       const std::vector<int64_t>& original_sizes) {
  return original_sizes.size() > 1 && !absl::EndsWith(name, ".bias");
}

}  // namespace fullshard
