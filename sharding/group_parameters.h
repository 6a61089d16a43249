#ifndef FULLSHARD_SHARDING_GROUP_PARAMETERS_H_
#define FULLSHARD_SHARDING_GROUP_PARAMETERS_H_

#include <functional>
#include <string>
#include <vector>

#include "fullshard/core/process_groups.h"
#include "fullshard/sharding/flat_parameter.h"
#include "fullshard/sharding/unit.h"

namespace fullshard::internal {

// A parameter with its values, about to be sharded.
struct PlacedParameter {
  OriginalParameter original;
  at::ScalarType compute_dtype = at::kFloat;
};

// Shards the parameters of one unit: those that agree in trainability
// (requires_grad), storage dtype and compute dtype share a flat parameter.
// `placement` gives the rest.
std::vector<c10::intrusive_ptr<FlatParameter>> group_parameters(
    const std::string& unit_name, std::vector<PlacedParameter> parameters,
    FlatParameter::Placement placement);

// Gathers the unit's parameters, makes those trainable for which `trainable`
// holds and freezes the others, and shards them again. The unit has no sink
// after that.
//
// Collective: the shard group. Requires: the unit is sharded.
void regroup_parameters(Unit& unit, c10d::Backend& shard_group,
                        const std::function<bool(const FlatParameter& flat,
                                                 size_t index)>& trainable);

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_GROUP_PARAMETERS_H_
