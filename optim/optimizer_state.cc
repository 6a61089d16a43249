#include "fullshard/optim/optimizer_state.h"

#include <cmath>
#include <set>
#include <utility>

#include "ATen/ops/full.h"
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
namespace {

using internal::FlatParameter;
using internal::OriginalParameter;
using TensorsByKey = std::map<std::string, at::Tensor>;

constexpr char kStep[] = "step";

// The entry under any of the parameter's names, or null.
const TensorsByKey* find(const FullOptimizerState& state,
                         const OriginalParameter& original,
                         std::set<std::string>& known) {
  const TensorsByKey* found = nullptr;
  auto look = [&](const std::string& name) {
    known.insert(name);
    const auto entry = state.state.find(name);
    if (found == nullptr && entry != state.state.end()) found = &entry->second;
  };
  look(original.name);
  for (const std::string& alias : original.aliases) look(alias);
  return found;
}

absl::StatusOr<int64_t> read_step(const std::string& name,
                                  const TensorsByKey& entry) {
  const auto step = entry.find(kStep);
  if (step == entry.end()) {
    return absl::NotFoundError(
        absl::StrCat("optimizer state of '", name, "': 'step' is missing"));
  }
  const double value =
      step->second.numel() == 1 ? step->second.item<double>() : -1;
  if (!(value >= 0 && value == std::floor(value))) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer state of '", name,
                     "': expected one whole number as step, got shape ",
                     c10::str(step->second.sizes()), ", value ", value));
  }
  return static_cast<int64_t>(value);
}

// This rank's part of one parameter's entry; null stands for none.
absl::StatusOr<LocalOptimizerState> localize(const ShardedOptimizer& optimizer,
                                             const FlatParameter& flat,
                                             size_t index,
                                             LocalOptimizerState local,
                                             const TensorsByKey* entry) {
  local.tensors.clear();
  local.step = 0;
  if (entry == nullptr) return local;
  const OriginalParameter& original = flat.parameters()[index];
  if (optimizer.has_step()) {
    FS_ASSIGN_OR_RETURN(local.step, read_step(original.name, *entry));
  } else {
    local.step = 1;
  }
  for (const std::string& key : optimizer.state_names()) {
    const auto found = entry->find(key);
    if (found == entry->end() || !found->second.defined()) {
      return absl::NotFoundError(absl::StrCat(
          "optimizer state of '", original.name, "': '", key, "' is missing"));
    }
    const at::Tensor& full = found->second;
    if (full.sizes() != original.tensor.sizes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("optimizer state of '", original.name, "': expected '",
                       key, "' of shape ", c10::str(original.tensor.sizes()),
                       ", got ", c10::str(full.sizes())));
    }
    local.tensors.emplace_back(key, internal::local_part(flat, index, full));
  }
  return local;
}

}  // namespace

absl::Status stream_optimizer_state(const ShardedOptimizer& optimizer,
                                    const OptimizerStateSink& sink,
                                    bool all_ranks) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  internal::ShardedState& state = *optimizer.sharded_state();
  const bool receives = all_ranks || state.groups().rank() == 0;
  const std::vector<LocalOptimizerState> locals = optimizer.local_state();
  absl::Status status;
  auto send = [&](const std::string& name, const std::string& key,
                  const at::Tensor& tensor) {
    if (!receives || !status.ok()) return;
    status = catch_errors(name, [&] { return sink(name, key, tensor); });
  };
  return catch_errors("gather of optimizer state", [&]() -> absl::Status {
    auto local = locals.begin();
    for (FlatParameter* flat : internal::trainable_flats(state)) {
      const auto first = local;
      local += static_cast<std::ptrdiff_t>(flat->parameters().size());
      auto is_saved = [&](const LocalOptimizerState& entry) {
        return entry.step > 0 || optimizer.has_state_at_step_0();
      };
      for (auto entry = first; optimizer.has_step() && entry != local;
           ++entry) {
        if (!is_saved(*entry)) continue;
        send(entry->name, kStep,
             at::full({}, static_cast<double>(entry->step), at::kFloat));
      }
      for (size_t k = 0; k < optimizer.state_names().size(); ++k) {
        const at::Tensor full = internal::gather_shards(
            *flat, optimizer.state_shard(*flat, k), *state.shard_group(),
            "all_gather of optimizer state");
        for (size_t i = 0; i < flat->parameters().size(); ++i) {
          const LocalOptimizerState& entry =
              first[static_cast<std::ptrdiff_t>(i)];
          if (!is_saved(entry)) continue;
          send(entry.name, optimizer.state_names()[k], flat->view_of(full, i));
        }
      }
    }
    return internal::agree(state, status, "gather of optimizer state");
  });
}

absl::StatusOr<FullOptimizerState> full_optimizer_state(
    const ShardedOptimizer& optimizer, bool all_ranks) {
  FullOptimizerState full;
  FS_RETURN_IF_ERROR(stream_optimizer_state(
      optimizer,
      [&](const std::string& name, const std::string& key,
          const at::Tensor& tensor) {
        full.state[name][key] =
            tensor.is_cpu() ? tensor.clone() : tensor.to(at::kCPU);
        return absl::OkStatus();
      },
      all_ranks));
  full.param_groups = optimizer_param_groups(optimizer);
  return full;
}

std::vector<FullOptimizerState::Group> optimizer_param_groups(
    const ShardedOptimizer& optimizer) {
  std::vector<FullOptimizerState::Group> groups;
  for (const OptimizerGroup& group : optimizer.groups()) {
    FullOptimizerState::Group full;
    full.params = group.parameters;
    full.options = {{"lr", group.lr}, {"weight_decay", group.weight_decay}};
    const OptimizerOptions others = optimizer.hyperparameters();
    full.options.insert(full.options.end(), others.begin(), others.end());
    groups.push_back(std::move(full));
  }
  return groups;
}

absl::Status load_full_optimizer_state(const FullOptimizerState& state,
                                       ShardedOptimizer& optimizer) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  std::vector<LocalOptimizerState> locals = optimizer.local_state();
  std::set<std::string> known;
  auto local = locals.begin();
  for (FlatParameter* flat :
       internal::trainable_flats(*optimizer.sharded_state())) {
    for (size_t i = 0; i < flat->parameters().size(); ++i, ++local) {
      const TensorsByKey* const entry =
          find(state, flat->parameters()[i], known);
      FS_ASSIGN_OR_RETURN(
          *local, localize(optimizer, *flat, i, std::move(*local), entry));
    }
  }
  for (const auto& [name, entry] : state.state) {
    if (known.count(name) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("optimizer state of '", name,
                       "': the model trains no parameter of that name"));
    }
  }
  return optimizer.load_local_state(locals);
}

}  // namespace fullshard
