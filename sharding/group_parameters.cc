#include "fullshard/sharding/group_parameters.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/sharding/gather_shards.h"

namespace fullshard::internal {

std::vector<c10::intrusive_ptr<FlatParameter>> group_parameters(
    const std::string& unit_name, std::vector<PlacedParameter> parameters,
    FlatParameter::Placement placement) {
  using Key = std::tuple<bool, at::ScalarType, at::ScalarType>;
  std::map<Key, std::vector<OriginalParameter>> by_key;
  std::vector<Key> order;  // First come, so that ranks agree.
  for (PlacedParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.original.tensor;
    const Key key{tensor.requires_grad(), tensor.scalar_type(),
                  parameter.compute_dtype};
    if (by_key.count(key) == 0) order.push_back(key);
    by_key[key].push_back(std::move(parameter.original));
  }
  std::vector<c10::intrusive_ptr<FlatParameter>> flats;
  for (const Key& key : order) {
    placement.trainable = std::get<0>(key);
    placement.compute_dtype = std::get<2>(key);
    flats.push_back(
        FlatParameter::create(unit_name, std::move(by_key[key]), placement));
  }
  return flats;
}

void regroup_parameters(Unit& unit, c10d::Backend& shard_group,
                        const std::function<bool(const FlatParameter& flat,
                                                 size_t index)>& trainable) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  const FlatParameter::Placement placement = unit.flats.at(0)->placement();
  std::vector<PlacedParameter> parameters;
  for (const auto& flat : unit.flats) {
    const at::ScalarType compute_dtype = flat->placement().compute_dtype;
    std::vector<bool> requires_grad;
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      requires_grad.push_back(trainable(*flat, i));
    }
    const at::Tensor full =
        gather_shards(*flat, flat->master_shard(), shard_group, "all_gather");
    std::vector<OriginalParameter> originals = flat->restore(full);
    for (size_t i = 0; i < originals.size(); ++i) {
      originals[i].tensor.set_requires_grad(requires_grad[i]);
      parameters.push_back({std::move(originals[i]), compute_dtype});
    }
  }
  unit.flats.clear();
  unit.sink.reset();
  std::sort(parameters.begin(), parameters.end(),
            [](const PlacedParameter& a, const PlacedParameter& b) {
              return a.original.position < b.original.position;
            });
  unit.flats = group_parameters(unit.name, std::move(parameters), placement);
}

}  // namespace fullshard::internal
