#include "fullshard/sharding/fully_shard.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "fullshard/core/catch_errors.h"
#include "fullshard/core/status.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/sharding/gradient_norm.h"
#include "fullshard/sharding/sharded_state.h"
#include "fullshard/sharding/split_into_units.h"
#include "fullshard/sharding/unshard.h"
#include "fullshard/sharding/whole_tensors.h"

namespace fullshard {
namespace {

using internal::FlatParameter;
using internal::norm_by_rows;

// Combines the local p-norms of the shards of all ranks.
double combine_norms(double local, double p, const ProcessGroups::Group& group,
                     c10::Device device) {
  if (group->getSize() == 1) return local;
  const bool is_max = std::isinf(p);
  at::Tensor value =
      at::zeros({1}, at::TensorOptions(at::kCPU).dtype(at::kDouble));
  value.data_ptr<double>()[0] = is_max ? local : std::pow(local, p);
  value = value.to(device);
  c10d::AllreduceOptions options;
  options.reduceOp = is_max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  std::vector<at::Tensor> tensors = {value};
  CollectiveScope scope("all_reduce of the gradient norm", nullptr, 0);
  group->allreduce(tensors, options)->wait();
  const double sum = value.cpu().data_ptr<double>()[0];
  return is_max ? sum : std::pow(sum, 1 / p);
}

}  // namespace

absl::Status ShardedModule::shard(std::shared_ptr<torch::nn::Module> module,
                                  const ProcessGroups& groups,
                                  const ShardOptions& options) {
  if (module == nullptr) {
    return absl::InvalidArgumentError("fully_shard: the module is null");
  }
  FS_RETURN_IF_ERROR(validate(options.mixed_precision));
  return catch_errors("fully_shard", [&]() -> absl::Status {
    FS_ASSIGN_OR_RETURN(auto units,
                        internal::split_into_units(*module, groups, options));
    whole_ = std::make_shared<internal::WholeTensors>(*module, groups, options);
    state_ = internal::ShardedState::create(groups, options, std::move(units),
                                            whole_->ignored_parameters());
    module_ = std::move(module);
    return absl::OkStatus();
  });
}

// --- forward

ShardedModule::ForwardScope::ForwardScope(const ShardedModule& sharded)
    : state_(sharded.state_), exceptions_(std::uncaught_exceptions()) {
  sharded.choose_precision();
  state_->begin_forward();
}

ShardedModule::ForwardScope::~ForwardScope() noexcept(false) {
  if (std::uncaught_exceptions() == exceptions_) {
    state_->end_forward();
  } else {
    state_->forward_failed();
  }
}

// Evaluation in full precision, if asked for. All ranks are in the same mode.
void ShardedModule::choose_precision() const {
  if (!state_->options().mixed_precision.full_precision_in_eval) return;
  const bool full = !at::GradMode::is_enabled() && !module_->is_training();
  if (full == state_->full_precision()) return;
  state_->set_full_precision(full);
  whole_->set_full_precision(full);
}

std::optional<at::ScalarType> ShardedModule::input_dtype() const {
  const MixedPrecision& policy = state_->options().mixed_precision;
  if (!policy.cast_forward_inputs || state_->full_precision()) {
    return std::nullopt;
  }
  return policy.param_dtype;
}

std::optional<at::ScalarType> ShardedModule::output_dtype() const {
  if (state_->full_precision()) return std::nullopt;
  return state_->options().mixed_precision.output_dtype;
}

// --- gradients

double ShardedModule::clip_grad_norm(double max_norm, double p) {
  TORCH_CHECK(
      !state_->steps_in_backward(),
      "clip_grad_norm: the optimizer steps in backward, so there is no "
      "gradient left to clip; see ShardedOptimizer::set_step_in_backward");
  at::NoGradGuard no_grad;
  const bool is_max = std::isinf(p);
  double local = 0;
  for (const auto& unit : state_->units()) {
    for (const auto& flat : unit->flats) {
      if (!flat->placement().trainable || !flat->has_gradient()) continue;
      const double norm = norm_by_rows(flat->gradient_shard(), p);
      if (std::isnan(norm)) {
        local = norm;
      } else if (is_max) {
        local = std::max(local, norm);
      } else {
        local += std::pow(norm, p);
      }
    }
  }
  if (!is_max) local = std::pow(local, 1 / p);
  local *= state_->pending_gradient_scale;
  double norm =
      combine_norms(local, p, state_->shard_group(), groups().device());
  for (const at::Tensor& parameter : state_->ignored_parameters()) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    const double whole = norm_by_rows(gradient.reshape(-1), p);
    norm = is_max ? std::max(norm, whole)
                  : std::pow(std::pow(norm, p) + std::pow(whole, p), 1 / p);
  }
  const double coefficient = max_norm / (norm + 1e-6);
  if (coefficient < 1 || std::isnan(coefficient)) {
    state_->pending_gradient_scale *= coefficient;
    if (!state_->optimizer_applies_scale) state_->apply_pending_scale();
    for (const at::Tensor& parameter : state_->ignored_parameters()) {
      if (parameter.grad().defined())
        parameter.mutable_grad().mul_(coefficient);
    }
  }
  return norm;
}

void ShardedModule::zero_grad(bool set_to_none) {
  state_->zero_grad(set_to_none);
}

void ShardedModule::set_requires_gradient_sync(bool value) {
  state_->set_requires_gradient_sync(value);
}

void ShardedModule::set_requires_all_reduce(bool value) {
  state_->set_requires_all_reduce(value);
}

ShardedModule::NoSync::NoSync(std::shared_ptr<internal::ShardedState> state)
    : state_(std::move(state)), before_(state_->requires_gradient_sync()) {
  state_->set_requires_gradient_sync(false);
}

ShardedModule::NoSync::~NoSync() {
  state_->set_requires_gradient_sync(before_);
}

// --- uneven inputs

ShardedModule::Join::Join(std::shared_ptr<internal::ShardedState> state)
    : state_(std::move(state)) {
  state_->set_joining(true);
}

ShardedModule::Join::~Join() { state_->set_joining(false); }

void ShardedModule::Join::finish(const std::function<void()>& step) {
  bool reduced = false;
  while (state_->shadow_step(&reduced)) {
    if (reduced) step();
  }
  state_->set_joining(false);
}

// --- parameters

std::vector<LocalParameter> ShardedModule::named_local_parameters() const {
  state_->notify_before_update();  // The first call moves the shards.
  state_->apply_pending_scale();
  std::vector<LocalParameter> locals;
  for (const auto& unit : state_->units()) {
    for (const auto& flat : unit->flats) {
      for (const auto& local : flat->local_parameters()) {
        const auto& original = flat->parameters()[local.index];
        locals.push_back(
            {original.name, local.tensor, original.tensor.sizes().vec()});
      }
    }
  }
  state_->keep_present();
  return locals;
}

std::vector<at::Tensor> ShardedModule::parameters() const {
  state_->notify_before_update();  // The first call moves the shards.
  std::vector<at::Tensor> shards;
  for (const auto& unit : state_->units()) {
    for (const auto& flat : unit->flats) {
      if (!flat->placement().trainable) continue;
      shards.push_back(flat->hand_out_master());
    }
  }
  state_->keep_present();
  return shards;
}

absl::Status ShardedModule::set_trainable(
    const std::function<bool(const std::string& name)>& which, bool value) {
  return catch_errors("set_trainable",
                      [&] { return state_->set_trainable(which, value); });
}

// --- inspection

std::vector<UnitInfo> ShardedModule::units() const {
  std::vector<UnitInfo> infos;
  for (const auto& unit : state_->units()) {
    UnitInfo info;
    info.name = unit->name;
    info.trainable = unit->trainable();
    info.unsharded = unit->state == internal::UnitState::kUnsharded;
    for (const auto& flat : unit->flats) {
      int64_t numel = 0;
      for (const auto& original : flat->parameters()) {
        info.parameters.push_back(original.name);
        numel += original.tensor.numel();
      }
      info.numel += numel;
      info.padding_numel += flat->layout().padded() - numel;
      info.unsharded_bytes += flat->padded_bytes();
      info.sharded_bytes += static_cast<int64_t>(flat->master_shard().nbytes());
    }
    infos.push_back(std::move(info));
  }
  return infos;
}

MemoryUse ShardedModule::memory_use() const {
  MemoryUse use;
  const internal::Transport& transport = state_->transport();
  const auto memory = transport.memory();
  use.slots = memory.slots;
  use.reduce_buffers = memory.reduce_buffers;
  use.masters = memory.shared_masters;
  for (const auto& unit : state_->units()) {
    if (unit->unreduced_gradients.defined()) {
      use.kept_gradients += unit->unreduced_gradients.numel();
    }
    const bool shared = transport.shares_masters(*unit);
    for (const auto& flat : unit->flats) {
      const auto num_bytes =
          static_cast<int64_t>(flat->master_shard().nbytes());
      if (!shared || flat->handed_out()) use.masters += num_bytes;
      use.gradients += flat->gradient_bytes();
    }
  }
  return use;
}

const ProcessGroups& ShardedModule::groups() const { return state_->groups(); }

}  // namespace fullshard
