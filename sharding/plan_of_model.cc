// The plan of a model that is sharded already.

#include "fullshard/sharding/fully_shard.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard {

Plan ShardedModule::plan(int optimizer_states) const {
  const ShardOptions& given = state_->options();
  PlanOptions options;
  options.num_shards = groups().shard_group()->getSize();
  options.num_replicas = groups().world_size() / options.num_shards;
  options.strategy = given.strategy;
  options.optimizer_states = optimizer_states;
  options.keep_low_precision_grads =
      given.mixed_precision.keep_low_precision_grads;
  std::vector<PlanUnit> units;
  for (const auto& unit : state_->units()) {
    PlanUnit planned;
    planned.name = unit->name;
    planned.encloses_others = unit->has_children;
    planned.reshard_after_forward = unit->reshard_after_forward;
    planned.reduce_dtype = unit->reduce_dtype;
    for (const auto& flat : unit->flats) {
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        PlanParameter parameter;
        parameter.name = flat->parameters()[i].name;
        parameter.numel = flat->parameters()[i].tensor.numel();
        parameter.dtype = flat->state_dtype();
        parameter.compute_dtype = flat->placement().compute_dtype;
        parameter.trainable = flat->placement().trainable;
        planned.parameters.push_back(std::move(parameter));
      }
    }
    units.push_back(std::move(planned));
  }
  return make_plan(units, options);
}

}  // namespace fullshard
