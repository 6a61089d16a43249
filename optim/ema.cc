#include "fullshard/optim/ema.h"

#include <cmath>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "c10/util/StringUtil.h"
#include "fullshard/core/catch_errors.h"
#include "fullshard/core/status.h"
#include "fullshard/optim/shard_runs.h"
#include "fullshard/sharding/gather_shards.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard {

using internal::FlatParameter;

ShardedEma::ShardedEma(const ShardedModule& sharded, double half_life_steps)
    : state_(sharded.state()), decay_(std::exp2(-1 / half_life_steps)) {
  TORCH_CHECK(half_life_steps > 0,
              "EMA: expected a half-life above 0 steps, got ", half_life_steps);
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  for (const FlatParameter* flat : internal::trainable_flats(*state_)) {
    averages_[flat] = start_average(*flat);
  }
  state_->add_observer(this);
}

ShardedEma::~ShardedEma() { state_->remove_observer(this); }

at::Tensor ShardedEma::start_average(const FlatParameter& flat) const {
  const at::ScalarType dtype =
      flat.storage_dtype() == at::kDouble ? at::kDouble : at::kFloat;
  return flat.master_shard().to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

void ShardedEma::before_layout_change(const internal::Unit& unit) {
  TORCH_CHECK(!swapped_in(), "EMA: set_trainable() while the average is in");
  for (const auto& flat : unit.flats) {
    const auto average = averages_.find(flat.get());
    if (average == averages_.end()) continue;
    const at::Tensor full =
        internal::gather_shards(*flat, average->second, *state_->shard_group(),
                                "all_gather of the EMA");
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      moving_[flat->parameters()[i].name] = flat->view_of(full, i);
    }
    averages_.erase(average);
  }
}

void ShardedEma::after_layout_change(const internal::Unit& unit) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  for (const auto& flat : unit.flats) {
    if (!flat->placement().trainable) continue;
    at::Tensor average = start_average(*flat);
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      const auto old = moving_.find(flat->parameters()[i].name);
      if (old != moving_.end()) {
        internal::copy_local_part(*flat, i, old->second, average);
      }
    }
    averages_[flat.get()] = average;
  }
  moving_.clear();
}

ShardedEma::Scope::Scope(ShardedEma& ema)
    : ema_(ema), exceptions_(std::uncaught_exceptions()) {
  ema_.swap_in();
}

ShardedEma::Scope::~Scope() noexcept(false) {
  const bool unwinding = std::uncaught_exceptions() != exceptions_;
  try {
    ema_.swap_out();
  } catch (const c10::Error&) {
    if (!unwinding) throw;  // Else the first error is the one to report.
  }
}

void ShardedEma::update() {
  TORCH_CHECK(!swapped_in(), "EMA: update() while the average is swapped in");
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  state_->notify_before_update();
  for (const FlatParameter* flat : internal::trainable_flats(*state_)) {
    at::Tensor& average = averages_.at(flat);
    average.lerp_(flat->master_shard().to(average.scalar_type()), 1 - decay_);
  }
}

void ShardedEma::swap_in() {
  TORCH_CHECK(!swapped_in(), "EMA: the average is swapped in already");
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  state_->begin_update();
  generations_.clear();
  for (const FlatParameter* flat : internal::trainable_flats(*state_)) {
    at::Tensor master = flat->master_shard();
    kept_.push_back(master.clone());
    master.copy_(averages_.at(flat));
    generations_.push_back(flat->generation());
  }
}

void ShardedEma::swap_out() {
  TORCH_CHECK(swapped_in(), "EMA: the average is not swapped in");
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  state_->begin_update();
  const std::vector<at::Tensor> kept = std::move(kept_);
  kept_.clear();
  const std::vector<FlatParameter*> flats = internal::trainable_flats(*state_);
  for (size_t i = 0; i < flats.size(); ++i) {
    TORCH_CHECK(flats[i]->generation() == generations_[i], "unit '",
                flats[i]->name(),
                "' was written while its average was swapped in; call "
                "swap_out() before training goes on");
  }
  for (size_t i = 0; i < flats.size(); ++i) {
    at::Tensor master = flats[i]->master_shard();
    master.copy_(kept[i]);
  }
}

std::vector<std::pair<std::string, at::Tensor>> ShardedEma::local_averages()
    const {
  TORCH_CHECK(!swapped_in(), "EMA: state while the average is swapped in");
  std::vector<std::pair<std::string, at::Tensor>> locals;
  for (const FlatParameter* flat : internal::trainable_flats(*state_)) {
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      const ShardLayout::Range range =
          flat->layout().local_range(i, flat->placement().shard_rank);
      locals.emplace_back(
          flat->parameters()[i].name,
          averages_.at(flat).narrow(0, range.shard_offset, range.numel));
    }
  }
  return locals;
}

absl::Status ShardedEma::full_state_dict(const TensorSink& sink,
                                         bool all_ranks) const {
  TORCH_CHECK(!swapped_in(), "EMA: state while the average is swapped in");
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  const bool receives = all_ranks || state_->groups().rank() == 0;
  absl::Status status;
  return catch_errors("gather of the EMA", [&]() -> absl::Status {
    for (const FlatParameter* flat : internal::trainable_flats(*state_)) {
      const at::Tensor full = internal::gather_shards(*flat, averages_.at(flat),
                                                      *state_->shard_group(),
                                                      "all_gather of the EMA");
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        const auto& original = flat->parameters()[i];
        const at::Tensor view = flat->view_of(full, i);
        auto send = [&](const std::string& name) {
          if (!receives || !status.ok()) return;
          status = catch_errors(name, [&] { return sink(name, view); });
        };
        send(original.name);
        for (const std::string& alias : original.aliases) send(alias);
      }
    }
    return internal::agree(*state_, status, "gather of the EMA");
  });
}

absl::Status ShardedEma::load_full_state_dict(const TensorSource& source) {
  TORCH_CHECK(!swapped_in(), "EMA: state while the average is swapped in");
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  state_->notify_before_update();
  for (const FlatParameter* flat : internal::trainable_flats(*state_)) {
    const at::Tensor& average = averages_.at(flat);
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      const auto& original = flat->parameters()[i];
      FS_ASSIGN_OR_RETURN(const at::Tensor full, source(original.name));
      if (full.sizes() != original.tensor.sizes()) {
        return absl::InvalidArgumentError(
            absl::StrCat("average of '", original.name, "': expected shape ",
                         c10::str(original.tensor.sizes()), ", got ",
                         c10::str(full.sizes())));
      }
      internal::copy_local_part(*flat, i, full, average);
    }
  }
  return absl::OkStatus();
}

}  // namespace fullshard
