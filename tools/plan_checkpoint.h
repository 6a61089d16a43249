#ifndef FULLSHARD_TOOLS_PLAN_CHECKPOINT_H_
#define FULLSHARD_TOOLS_PLAN_CHECKPOINT_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "fullshard/io/checkpoint_reader.h"
#include "fullshard/sharding/plan.h"

namespace fullshard {

// The units of a model of which only a checkpoint is there; reads no tensor.
//
// A checkpoint has names but no modules, so names make units: by default a name
// belongs to its part up to the first number, as "model.layers.3" of
// "model.layers.3.mlp.weight", and to the root if there is none.
// `unit_pattern`, a regular expression (ECMAScript), replaces that: the unit is
// what it matches at the beginning of the name. Tied tensors count once.
// `storage_dtype` replaces the dtype of floating tensors.
//
// Errors: kInvalidArgument for a pattern that is none or matches no name, and
// for a tensor whose dtype LibTorch lacks.
absl::StatusOr<std::vector<PlanUnit>> units_of_checkpoint(
    const CheckpointReader& checkpoint,
    const std::optional<std::string>& unit_pattern,
    std::optional<at::ScalarType> storage_dtype);

}  // namespace fullshard

#endif  // FULLSHARD_TOOLS_PLAN_CHECKPOINT_H_
