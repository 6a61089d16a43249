#ifndef FULLSHARD_OPTIM_PARAM_GROUPS_H_
#define FULLSHARD_OPTIM_PARAM_GROUPS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fullshard {

// Says of a parameter, by its name and shape in the unsharded model, whether
// weight decay applies to it.
using DecayPredicate = std::function<bool(
    const std::string& name, const std::vector<int64_t>& original_sizes)>;

// No decay for vectors, scalars and what is called a bias. The shapes are those
// before sharding: afterwards every parameter is 1-D.
bool decays_by_default(const std::string& name,
                       const std::vector<int64_t>& original_sizes);

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_PARAM_GROUPS_H_
