// What users unshard by hand: whole units, and full parameters.

#include "fullshard/sharding/unshard.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/status.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/sharding/gather_shards.h"

namespace fullshard {
namespace internal {

absl::StatusOr<std::vector<Unit*>> find_units(
    const ShardedState& state, const std::vector<std::string>& names) {
  std::vector<Unit*> found;
  std::vector<std::string> known;
  for (const auto& unit : state.units()) {
    known.push_back(unit->name);
    if (names.empty()) found.push_back(unit.get());
  }
  for (const std::string& name : names) {
    for (const auto& unit : state.units()) {
      if (unit->name == name) found.push_back(unit.get());
    }
    if (found.empty() || found.back()->name != name) {
      return absl::NotFoundError(absl::StrCat(
          "no unit '", name, "', there are ", absl::StrJoin(known, ", ")));
    }
  }
  return found;
}

}  // namespace internal

using internal::find_units;
using internal::Prefetcher;
using internal::ShardedState;
using internal::Unit;

namespace {

absl::Status set_prefetch(ShardedState& state, const std::string& unit,
                          const std::vector<std::string>& next,
                          Prefetcher::Phase phase) {
  FS_ASSIGN_OR_RETURN(const auto from, find_units(state, {unit}));
  std::vector<Unit*> to;
  if (!next.empty()) {
    FS_ASSIGN_OR_RETURN(to, find_units(state, next));
  }
  state.set_prefetch(*from[0], phase, std::move(to));
  return absl::OkStatus();
}

}  // namespace

ShardedModule::UnshardHandle::UnshardHandle(
    std::shared_ptr<internal::ShardedState> state, std::vector<Unit*> units)
    : state_(std::move(state)), units_(std::move(units)) {}

void ShardedModule::UnshardHandle::wait() {
  for (Unit* unit : units_) state_->finish_unshard(*unit);
}

absl::StatusOr<ShardedModule::UnshardHandle> ShardedModule::unshard(
    const std::vector<std::string>& units) const {
  FS_ASSIGN_OR_RETURN(auto found, find_units(*state_, units));
  for (Unit* unit : found) state_->start_unshard(*unit);
  return UnshardHandle(state_, std::move(found));
}

void ShardedModule::reshard() { state_->begin_update(); }

absl::Status ShardedModule::reshard(const std::vector<std::string>& units) {
  FS_ASSIGN_OR_RETURN(const auto found, find_units(*state_, units));
  for (Unit* unit : found) state_->reshard(*unit);
  return absl::OkStatus();
}

absl::Status ShardedModule::set_reshard_after_forward(
    bool value, const std::vector<std::string>& units) {
  FS_ASSIGN_OR_RETURN(const auto found, find_units(*state_, units));
  state_->begin_update();
  for (Unit* unit : found) unit->reshard_after_forward = value;
  state_->record_order_anew();
  return absl::OkStatus();
}

void ShardedModule::set_reshard_after_backward(bool value) {
  state_->set_reshard_after_backward(value);
}

absl::Status ShardedModule::set_forward_prefetch(
    const std::string& unit, const std::vector<std::string>& next) {
  return set_prefetch(*state_, unit, next, Prefetcher::kForward);
}

absl::Status ShardedModule::set_backward_prefetch(
    const std::string& unit, const std::vector<std::string>& next) {
  return set_prefetch(*state_, unit, next, Prefetcher::kBackward);
}

absl::Status ShardedModule::summon_full_params(
    const SummonOptions& options,
    const std::function<absl::Status(std::vector<FullParameter>&)>& body) {
  if (options.writeback && options.rank0_only) {
    return absl::InvalidArgumentError(
        "summon_full_params: writeback and rank0_only exclude each other; "
        "other ranks would not see the edit");
  }
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  state_->apply_pending_scale();
  c10d::Backend& group = *state_->shard_group();
  const bool receives = !options.rank0_only || groups().rank() == 0;
  std::vector<FullParameter> parameters;
  const auto take = [&](const at::Tensor& view) {
    return options.offload_to_cpu ? view.to(at::kCPU, /*non_blocking=*/false,
                                            /*copy=*/true)
                                  : view.clone();
  };
  for (const auto& unit : state_->units()) {
    for (const auto& flat : unit->flats) {
      const at::Tensor values = internal::gather_shards(
          *flat, flat->master_shard(), group, "all_gather");
      at::Tensor gradients;
      if (options.with_gradients && flat->placement().trainable &&
          flat->has_gradient()) {
        gradients = internal::gather_shards(*flat, flat->gradient_shard(),
                                            group, "all_gather of gradients");
      }
      if (!receives) continue;
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        parameters.push_back(
            {flat->parameters()[i].name, take(flat->view_of(values, i)),
             gradients.defined() ? take(flat->view_of(gradients, i))
                                 : at::Tensor()});
      }
    }
  }
  FS_RETURN_IF_ERROR(body(parameters));
  if (!options.writeback) return absl::OkStatus();
  state_->begin_update();
  size_t next = 0;
  for (const auto& unit : state_->units()) {
    for (const auto& flat : unit->flats) {
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        flat->load(i, parameters[next++].value);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace fullshard
