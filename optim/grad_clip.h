#ifndef FULLSHARD_OPTIM_GRAD_CLIP_H_
#define FULLSHARD_OPTIM_GRAD_CLIP_H_

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "fullshard/optim/param_groups.h"
#include "fullshard/sharding/fully_shard.h"

namespace fullshard {

// Returns the module that a parameter's norm counts for.
using ModuleOfParameter = std::function<std::string(const std::string& name)>;

// The first `depth` parts of the module's path: with 2, "llm.layers.3.up.bias"
// counts for "llm.layers". Parameters of the root count for "".
ModuleOfParameter module_at_depth(int depth);

struct GradNormOptions {
  // The order of the norm: above 0, or infinity.
  double p = 2;
  // Parameters that are measured and clipped on their own. A parameter belongs
  // to the first group that matches it; what is left is one group more.
  struct Group {
    std::string name;
    ParameterPredicate matches;
    double max_norm = std::numeric_limits<double>::infinity();
  };
  std::vector<Group> groups;
  // If set, norms are also taken by module; costs a pass in smaller pieces.
  ModuleOfParameter module_of;
  // Makes a norm that is infinite or not a number an error.
  bool error_if_nonfinite = false;
};

// Norms of the mean gradient before clipping, the same on every rank.
struct GradNorms {
  double total = 0;  // Of all trainable parameters.
  double rest = 0;   // Of those in no group.
  std::vector<double> groups;
  std::vector<std::pair<std::string, double>> modules;  // In module order.
};

// Measures the gradients of the whole model. Those of parameters without a
// gradient are 0.
//
// Collective: one or two small all-reduces in the shard group.
// Errors: kInvalidArgument for a p that is not above 0 and for a group without
// parameters; kFailedPrecondition for a norm that is not finite, if asked for.
absl::StatusOr<GradNorms> grad_norms(const ShardedModule& sharded,
                                     const GradNormOptions& options = {});

// Scales the gradients of each group by max_norm / (norm + 1e-6), if that is
// below 1; `max_norm` is that of the parameters in no group. Returns the norms
// before.
//
// If all groups are scaled alike, as without groups, an optimizer of this
// library that is attached does it in its next step(), as after
// ShardedModule::clip_grad_norm.
//
// Collective, Errors: as grad_norms(); then no gradient has changed.
absl::StatusOr<GradNorms> clip_grad_norms(const ShardedModule& sharded,
                                          double max_norm,
                                          const GradNormOptions& options = {});

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_GRAD_CLIP_H_
