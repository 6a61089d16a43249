#include <algorithm>

#include "absl/strings/str_cat.h"
#include "fullshard/sharding/group_parameters.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard::internal {
namespace {

using Which = std::function<bool(const std::string& name)>;

bool changes(const FlatParameter& flat, size_t index, const Which& which,
             bool value) {
  return flat.placement().trainable != value &&
         which(flat.parameters()[index].name);
}

// Whether any parameter of the unit changes, if it can.
absl::StatusOr<bool> unit_changes(const Unit& unit, const Which& which,
                                  bool value) {
  bool any = false;
  for (const auto& flat : unit.flats) {
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      if (!changes(*flat, i, which, value)) continue;
      any = true;
      if (!at::isFloatingType(flat->storage_dtype())) {
        return absl::InvalidArgumentError(absl::StrCat(
            "set_trainable: parameter '", flat->parameters()[i].name,
            "': expected a floating dtype, got ",
            at::toString(flat->storage_dtype())));
      }
    }
  }
  const bool has_gradient =
      unit.unreduced_gradients.defined() ||
      std::any_of(unit.unreduced_shards.begin(), unit.unreduced_shards.end(),
                  [](const at::Tensor& shard) { return shard.defined(); }) ||
      std::any_of(unit.flats.begin(), unit.flats.end(),
                  [](const auto& flat) { return flat->has_gradient(); });
  if (any && has_gradient) {
    return absl::FailedPreconditionError(
        absl::StrCat("set_trainable: unit '", unit.name,
                     "' has a gradient, which would be lost; call it after "
                     "zero_grad()"));
  }
  return any;
}

}  // namespace

void ShardedState::add_observer(ShardedStateObserver* observer) {
  observers_.push_back(observer);
}

void ShardedState::remove_observer(ShardedStateObserver* observer) {
  observers_.erase(std::remove(observers_.begin(), observers_.end(), observer),
                   observers_.end());
}

absl::Status ShardedState::set_trainable(const Which& which, bool value) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<Unit*> touched;
  for (const auto& unit : units_) {
    const absl::StatusOr<bool> any = unit_changes(*unit, which, value);
    if (!any.ok()) return any.status();
    if (*any) touched.push_back(unit.get());
  }
  if (touched.empty()) return absl::OkStatus();
  // New flat parameters take over the policy's dtype, not that of evaluation.
  const bool full_precision = full_precision_;
  if (full_precision) set_full_precision(false);
  begin_update();
  for (Unit* unit : touched) {
    for (ShardedStateObserver* observer : observers_) {
      observer->before_layout_change(*unit);
    }
    regroup_parameters(*unit, *shard_group_,
                       [&](const FlatParameter& flat, size_t index) {
                         return changes(flat, index, which, value)
                                    ? value
                                    : flat.placement().trainable;
                       });
    attach_sinks(*unit);
    for (ShardedStateObserver* observer : observers_) {
      observer->after_layout_change(*unit);
    }
  }
  record_order_anew();
  start_order_anew();
  make_transport();
  if (full_precision) set_full_precision(true);
  return absl::OkStatus();
}

}  // namespace fullshard::internal
