#include "fullshard/optim/sharded_optimizer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>

#include "ATen/ops/full.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/optim/shard_runs.h"
#include "fullshard/sharding/gather_shards.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard {
namespace {

using internal::FlatParameter;
using internal::ShardRun;

void check_not_negative(double value, const char* what) {
  TORCH_CHECK(value >= 0, "optimizer: expected ", what, " of 0 or more, got ",
              value);
}

at::Tensor scalar(double value, c10::Device device) {
  return at::full({}, value, at::TensorOptions(device).dtype(at::kFloat));
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(const ShardedModule& sharded, Config config)
    : state_(sharded.state()), config_(std::move(config)), lr_(config_.lr) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  check_not_negative(config_.lr, "lr");
  check_not_negative(config_.weight_decay, "weight_decay");
  for (const ParamGroup& group : config_.groups) {
    check_not_negative(group.lr_scale, "lr_scale");
    check_not_negative(group.weight_decay.value_or(0), "weight_decay");
  }
  for (const StateTensor& tensor : config_.state) {
    state_names_.push_back(tensor.name);
    initial_values_.push_back(tensor.initial_value);
  }
  for (FlatParameter* flat : internal::trainable_flats(*state_)) {
    flats_.push_back(make_state(*flat));
  }
  make_groups();
  check_groups();
  for (FlatState& flat_state : flats_) {
    set_steps(flat_state,
              std::vector<int64_t>(flat_state.flat->parameters().size()));
  }
  state_->optimizer_applies_scale = true;
  state_->add_observer(this);
}

ShardedOptimizer::~ShardedOptimizer() {
  state_->remove_observer(this);
  state_->optimizer_applies_scale = false;
  if (state_->steps_in_backward()) state_->set_on_reduced(nullptr);
}

ShardedOptimizer::FlatState ShardedOptimizer::make_state(
    FlatParameter& flat) const {
  FlatState flat_state;
  flat_state.flat = &flat;
  for (double value : initial_values_) {
    flat_state.state.push_back(value == 0
                                   ? at::zeros_like(flat.master_shard())
                                   : at::full_like(flat.master_shard(), value));
  }
  return flat_state;
}

// Every given group, and the default one, splits into what decays and what does
// not. Groups that stay empty are dropped; the others keep their rates.
void ShardedOptimizer::make_groups() {
  const std::vector<ParamGroup>& given = config_.groups;
  std::map<std::string, double> rates;
  for (const OptimizerGroup& group : groups_) rates[group.name] = group.lr;
  groups_.clear();
  std::vector<OptimizerGroup> all;
  for (size_t g = 0; g <= given.size(); ++g) {
    OptimizerGroup group;
    group.name = "default";
    group.weight_decay = config_.weight_decay;
    if (g < given.size()) {
      group.name = given[g].name;
      group.lr_scale = given[g].lr_scale;
      group.weight_decay = given[g].weight_decay.value_or(config_.weight_decay);
    }
    all.push_back(group);
    absl::StrAppend(&group.name, "/no_decay");
    group.weight_decay = 0;
    all.push_back(std::move(group));
  }
  for (FlatState& flat_state : flats_) {
    flat_state.group_of.clear();
    for (const auto& original : flat_state.flat->parameters()) {
      const std::vector<int64_t> sizes = original.tensor.sizes().vec();
      size_t g = 0;
      while (g < given.size() && !given[g].matches(original.name, sizes)) ++g;
      const size_t group =
          2 * g + (config_.decays(original.name, sizes) ? 0 : 1);
      all[group].parameters.push_back(original.name);
      flat_state.group_of.push_back(group);
    }
  }
  std::vector<size_t> place;
  for (OptimizerGroup& group : all) {
    place.push_back(groups_.size());
    if (group.parameters.empty()) continue;
    const auto rate = rates.find(group.name);
    group.lr = rate != rates.end() ? rate->second : lr_ * group.lr_scale;
    groups_.push_back(std::move(group));
  }
  for (FlatState& flat_state : flats_) {
    for (size_t& group : flat_state.group_of) group = place[group];
  }
}

void ShardedOptimizer::check_groups() const {
  for (const ParamGroup& given : config_.groups) {
    const bool found = std::any_of(
        groups_.begin(), groups_.end(), [&](const OptimizerGroup& group) {
          return group.name == given.name ||
                 group.name == absl::StrCat(given.name, "/no_decay");
        });
    TORCH_CHECK(found, "parameter group '", given.name,
                "' matches no trainable parameter that an earlier group left");
  }
}

void ShardedOptimizer::before_layout_change(const internal::Unit& unit) {
  for (const FlatState& flat_state : flats_) {
    FlatParameter& flat = *flat_state.flat;
    if (flat.unit != &unit) continue;
    for (size_t i = 0; i < flat.parameters().size(); ++i) {
      moving_[flat.parameters()[i].name].step =
          flat_state.clocks[flat_state.clock_of[i]].updates;
    }
    for (const at::Tensor& tensor : flat_state.state) {
      const at::Tensor full =
          internal::gather_shards(flat, tensor, *state_->shard_group(),
                                  "all_gather of optimizer state");
      for (size_t i = 0; i < flat.parameters().size(); ++i) {
        moving_[flat.parameters()[i].name].tensors.push_back(
            flat.view_of(full, i));
      }
    }
  }
  flats_.erase(std::remove_if(flats_.begin(), flats_.end(),
                              [&](const FlatState& flat_state) {
                                return flat_state.flat->unit == &unit;
                              }),
               flats_.end());
}

void ShardedOptimizer::after_layout_change(const internal::Unit&) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  std::vector<FlatState> old = std::move(flats_);
  flats_.clear();
  std::vector<std::vector<int64_t>> steps;
  for (FlatParameter* flat : internal::trainable_flats(*state_)) {
    steps.emplace_back();
    const auto found = std::find_if(
        old.begin(), old.end(),
        [&](const FlatState& flat_state) { return flat_state.flat == flat; });
    if (found != old.end()) {
      for (size_t clock : found->clock_of) {
        steps.back().push_back(found->clocks[clock].updates);
      }
      flats_.push_back(std::move(*found));
      continue;
    }
    flats_.push_back(make_state(*flat));
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      const MovedState& moved = moving_[flat->parameters()[i].name];
      steps.back().push_back(moved.step);
      for (size_t k = 0; k < moved.tensors.size(); ++k) {
        internal::copy_local_part(*flat, i, moved.tensors[k],
                                  flats_.back().state[k]);
      }
    }
  }
  moving_.clear();
  make_groups();
  for (size_t f = 0; f < flats_.size(); ++f) set_steps(flats_[f], steps[f]);
}

void ShardedOptimizer::make_runs(FlatState& flat_state) const {
  FlatParameter& flat = *flat_state.flat;
  std::vector<size_t> keys;
  for (size_t i = 0; i < flat_state.group_of.size(); ++i) {
    keys.push_back(flat_state.group_of[i] * flat_state.clocks.size() +
                   flat_state.clock_of[i]);
  }
  flat_state.runs.clear();
  for (const ShardRun& shard_run : internal::split_shard(flat, keys)) {
    Run run;
    run.begin = shard_run.begin;
    run.end = shard_run.end;
    run.parameter = shard_run.of(flat.master_shard());
    for (const at::Tensor& tensor : flat_state.state) {
      run.state.push_back(shard_run.of(tensor));
    }
    run.group = shard_run.key / flat_state.clocks.size();
    run.clock = shard_run.key % flat_state.clocks.size();
    flat_state.runs.push_back(std::move(run));
  }
  flat_state.gradient = at::Tensor();
}

void ShardedOptimizer::set_gradients(FlatState& flat_state) {
  const at::Tensor& gradient = flat_state.flat->gradient_shard();
  if (gradient.is_same(flat_state.gradient)) return;
  for (Run& run : flat_state.runs) {
    run.gradient = gradient.narrow(0, run.begin, run.end - run.begin);
  }
  flat_state.gradient = gradient;
}

void ShardedOptimizer::drop_gradients(FlatState& flat_state) {
  for (Run& run : flat_state.runs) run.gradient = at::Tensor();
  flat_state.gradient = at::Tensor();
}

void ShardedOptimizer::before_gradients_are_freed() {
  for (FlatState& flat_state : flats_) drop_gradients(flat_state);
}

void ShardedOptimizer::set_steps(FlatState& flat_state,
                                 const std::vector<int64_t>& steps) {
  flat_state.clocks.clear();
  flat_state.clock_of.clear();
  std::map<int64_t, size_t> clock_at;
  for (int64_t step : steps) {
    const auto [found, is_new] =
        clock_at.emplace(step, flat_state.clocks.size());
    if (is_new) {
      flat_state.clocks.push_back(
          {step, scalar(static_cast<double>(step),
                        flat_state.flat->master_device())});
    }
    flat_state.clock_of.push_back(found->second);
  }
  make_runs(flat_state);
}

std::optional<at::Tensor> ShardedOptimizer::take_grad_scale() {
  const double scale = std::exchange(state_->pending_gradient_scale, 1);
  if (scale == 1) return std::nullopt;
  return scalar(1 / scale, flats_.empty() ? state_->groups().device()
                                          : flats_[0].flat->master_device());
}

void ShardedOptimizer::step() {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  state_->begin_update();
  const std::optional<at::Tensor> grad_scale = take_grad_scale();
  Batches batches;
  for (FlatState& flat_state : flats_) {
    FlatParameter& flat = *flat_state.flat;
    if (!flat.has_gradient()) continue;
    collect(flat_state, batches);
    // Gradients in another dtype were converted: not of all units at once.
    if (flat.gradient_shard().scalar_type() != flat.storage_dtype()) {
      update_all(batches, grad_scale);
    }
  }
  update_all(batches, grad_scale);
  for (FlatState& flat_state : flats_) {
    if (flat_state.flat->has_gradient()) flat_state.flat->note_update();
  }
}

// Counts an update of these parameters and adds their runs to what is updated
// together; the kernels want lists of one dtype.
void ShardedOptimizer::collect(FlatState& flat_state, Batches& batches) {
  set_gradients(flat_state);
  for (Clock& clock : flat_state.clocks) {
    ++clock.updates;
    clock.step.add_(1);
  }
  for (const Run& run : flat_state.runs) {
    const Clock& clock = flat_state.clocks[run.clock];
    const bool is_first = clock.updates == 1;
    Batch& batch = batches[{run.group, run.parameter.scalar_type(), is_first}];
    batch.group = &groups_[run.group];
    batch.first_update = is_first;
    batch.parameters.push_back(run.parameter);
    batch.gradients.push_back(run.gradient.to(run.parameter.scalar_type()));
    batch.steps.push_back(clock.step);
    batch.state.resize(run.state.size());
    for (size_t i = 0; i < run.state.size(); ++i) {
      batch.state[i].push_back(run.state[i]);
    }
  }
}

void ShardedOptimizer::update_all(Batches& batches,
                                  const std::optional<at::Tensor>& grad_scale) {
  for (auto& [key, batch] : batches) update(batch, grad_scale);
  batches.clear();
}

void ShardedOptimizer::set_step_in_backward(bool value) {
  if (value) {
    state_->set_on_reduced([this](internal::Unit& unit) { update_unit(unit); });
  } else {
    state_->set_on_reduced(nullptr);
  }
}

void ShardedOptimizer::update_unit(const internal::Unit& unit) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  state_->notify_before_update();
  Batches batches;
  for (FlatState& flat_state : flats_) {
    FlatParameter& flat = *flat_state.flat;
    if (flat.unit == &unit && flat.has_gradient()) {
      collect(flat_state, batches);
    }
  }
  update_all(batches, std::nullopt);
  for (FlatState& flat_state : flats_) {
    FlatParameter& flat = *flat_state.flat;
    if (flat.unit != &unit || !flat.has_gradient()) continue;
    flat.note_update();
    drop_gradients(flat_state);
    flat.free_gradient();
  }
}

void ShardedOptimizer::zero_grad(bool set_to_none) {
  state_->zero_grad(set_to_none);
}

void ShardedOptimizer::set_lr(double lr) {
  lr_ = lr;
  for (OptimizerGroup& group : groups_) group.lr = lr * group.lr_scale;
}

void ShardedOptimizer::set_group_lr(size_t group, double lr) {
  TORCH_CHECK(group < groups_.size(), "optimizer: expected one of ",
              groups_.size(), " groups, got ", group);
  groups_[group].lr = lr;
}

// --- state by name

LocalOptimizerState ShardedOptimizer::local_state(const FlatState& flat_state,
                                                  size_t parameter) const {
  const FlatParameter& flat = *flat_state.flat;
  const auto& original = flat.parameters()[parameter];
  const ShardLayout::Range range =
      flat.layout().local_range(parameter, flat.placement().shard_rank);
  LocalOptimizerState local;
  local.name = original.name;
  local.original_sizes = original.tensor.sizes().vec();
  local.parameter_offset = range.parameter_offset;
  local.numel = range.numel;
  local.step = flat_state.clocks[flat_state.clock_of[parameter]].updates;
  for (size_t i = 0; i < state_names_.size(); ++i) {
    local.tensors.emplace_back(
        state_names_[i],
        flat_state.state[i].narrow(0, range.shard_offset, range.numel));
  }
  return local;
}

const at::Tensor& ShardedOptimizer::state_shard(const FlatParameter& flat,
                                                size_t state_name) const {
  const auto found =
      std::find_if(flats_.begin(), flats_.end(),
                   [&](const FlatState& own) { return own.flat == &flat; });
  TORCH_CHECK(found != flats_.end(), "unit '", flat.name(),
              "' is not trained by this optimizer");
  return found->state.at(state_name);
}

std::vector<LocalOptimizerState> ShardedOptimizer::local_state() const {
  std::vector<LocalOptimizerState> locals;
  for (const FlatState& flat_state : flats_) {
    for (size_t i = 0; i < flat_state.flat->parameters().size(); ++i) {
      locals.push_back(local_state(flat_state, i));
    }
  }
  return locals;
}

namespace {

const at::Tensor* find_tensor(const LocalOptimizerState& state,
                              const std::string& name) {
  for (const auto& [key, tensor] : state.tensors) {
    if (key == name) return &tensor;
  }
  return nullptr;
}

absl::Status check_fits(const LocalOptimizerState& own,
                        const LocalOptimizerState& given) {
  if (given.parameter_offset != own.parameter_offset ||
      given.numel != own.numel) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer state of '", own.name, "': expected ",
                     own.numel, " elements from ", own.parameter_offset,
                     ", got ", given.numel, " from ", given.parameter_offset));
  }
  if (given.step < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer state of '", own.name,
                     "': expected a step of 0 or more, got ", given.step));
  }
  for (const auto& [key, tensor] : own.tensors) {
    const at::Tensor* const source = find_tensor(given, key);
    if (source == nullptr && given.step > 0) {
      return absl::NotFoundError(absl::StrCat("optimizer state of '", own.name,
                                              "': '", key, "' is missing"));
    }
    if (source != nullptr && source->numel() != own.numel) {
      return absl::InvalidArgumentError(absl::StrCat(
          "optimizer state of '", own.name, "': expected ", own.numel,
          " elements of '", key, "', got ", source->numel()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ShardedOptimizer::load_local_state(
    const std::vector<LocalOptimizerState>& state) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  std::unordered_map<std::string, const LocalOptimizerState*> by_name;
  for (const LocalOptimizerState& given : state) by_name[given.name] = &given;
  for (const LocalOptimizerState& own : local_state()) {
    const auto found = by_name.find(own.name);
    if (found == by_name.end()) {
      return absl::NotFoundError(
          absl::StrCat("optimizer state of '", own.name, "' is missing"));
    }
    const absl::Status fits = check_fits(own, *found->second);
    if (!fits.ok()) return fits;
  }
  state_->notify_before_update();
  for (FlatState& flat_state : flats_) {
    std::vector<int64_t> steps;
    for (size_t i = 0; i < flat_state.flat->parameters().size(); ++i) {
      LocalOptimizerState own = local_state(flat_state, i);
      const LocalOptimizerState& given = *by_name[own.name];
      steps.push_back(given.step);
      for (size_t t = 0; t < own.tensors.size(); ++t) {
        auto& [key, tensor] = own.tensors[t];
        const at::Tensor* const source = find_tensor(given, key);
        if (source != nullptr) {
          tensor.copy_(source->view({-1}));
        } else {
          tensor.fill_(initial_values_[t]);
        }
      }
    }
    set_steps(flat_state, steps);
  }
  return absl::OkStatus();
}

}  // namespace fullshard
