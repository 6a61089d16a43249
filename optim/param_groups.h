#ifndef FULLSHARD_OPTIM_PARAM_GROUPS_H_
#define FULLSHARD_OPTIM_PARAM_GROUPS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fullshard {

// Selects parameters by their name and shape in the unsharded model. The shapes
// are those before sharding: afterwards every parameter is 1-D.
using ParameterPredicate = std::function<bool(
    const std::string& name, const std::vector<int64_t>& original_sizes)>;

// Says of a parameter whether weight decay applies to it.
using DecayPredicate = ParameterPredicate;

// No decay for vectors, scalars and what is called a bias.
bool decays_by_default(const std::string& name,
                       const std::vector<int64_t>& original_sizes);
// Decay for everything, as torch::optim does without groups.
bool decays_always(const std::string& name,
                   const std::vector<int64_t>& original_sizes);

// Selects the parameters of the module `path`, and of the modules below it:
// in_module("vision_backbone") selects "vision_backbone.norm.weight".
ParameterPredicate in_module(std::string path);

// Parameters with a rate or a decay of their own. A parameter belongs to the
// first group that matches it, or to the optimizer's defaults.
struct ParamGroup {
  std::string name;
  ParameterPredicate matches;
  // The group's rate is the optimizer's times this, whatever the schedule sets.
  double lr_scale = 1;
  // In place of the optimizer's; applies to the parameters that decay.
  std::optional<double> weight_decay;
};

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_PARAM_GROUPS_H_
