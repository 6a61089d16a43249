#include "fullshard/training_checkpoint_loader.h"

#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"

namespace fullshard::internal {

TrainingCheckpointLoader::TrainingCheckpointLoader(
    const ShardedCheckpointReader& reader, ShardedModule& model,
    ShardedOptimizer* optimizer, const TrainingCheckpointsOptions& options)
    : reader_(reader),
      model_(model),
      optimizer_(optimizer),
      ema_(options.ema),
      cast_dtypes_(options.cast_dtypes),
      paths_(options) {
  for (LocalShard& shard : model.local_shards()) {
    shards_.emplace(shard.name, std::move(shard));
  }
  if (optimizer != nullptr) states_ = optimizer->local_state();
}

absl::Status TrainingCheckpointLoader::check() {
  if (ema_ != nullptr && ema_->swapped_in()) {
    return absl::FailedPreconditionError(
        "load while the average is swapped in: call swap_out() before");
  }
  for (const auto& [name, shard] : shards_) {
    const SavedTensor* const saved = find_model(shard);
    FS_RETURN_IF_ERROR(check_tensor(saved, paths_.model(name), shard.sizes,
                                    shard.values.scalar_type()));
    for (const std::string& alias : shard.aliases) {
      known_.insert(flat_name(paths_.model(alias)));
    }
  }
  for (const auto& [name, tensor] : model_.whole_tensors()) {
    FS_RETURN_IF_ERROR(check_tensor(reader_.find(flat_name(paths_.model(name))),
                                    paths_.model(name), tensor.sizes().vec(),
                                    tensor.scalar_type()));
  }
  for (const LocalOptimizerState& state : states_) {
    FS_RETURN_IF_ERROR(check_optimizer(shards_.at(state.name)));
  }
  if (ema_ != nullptr) {
    for (const auto& [name, average] : ema_->local_averages()) {
      const LocalShard& shard = shards_.at(name);
      FS_RETURN_IF_ERROR(
          check_tensor(find_average(shard), paths_.ema(name), shard.sizes,
                       as_parameter(shard, average).scalar_type()));
    }
  }
  return check_for_unknown();
}

absl::Status TrainingCheckpointLoader::load() {
  FS_RETURN_IF_ERROR(model_.load_local_shards(
      [&](const LocalShard& shard) {
        return fill(*find_model(shard), shard, shard.values);
      },
      [&](const std::string& name) {
        return reader_.tensor(*reader_.find(flat_name(paths_.model(name))));
      }));
  if (ema_ != nullptr) {
    for (const auto& [name, average] : ema_->local_averages()) {
      const LocalShard& shard = shards_.at(name);
      FS_RETURN_IF_ERROR(
          fill(*find_average(shard), shard, as_parameter(shard, average)));
    }
  }
  return optimizer_ == nullptr ? absl::OkStatus() : load_optimizer();
}

template <class MakePath>
const ShardedManifest::Tensor* TrainingCheckpointLoader::find(
    const LocalShard& shard, MakePath make_path) const {
  const SavedTensor* saved = reader_.find(flat_name(make_path(shard.name)));
  for (const std::string& alias : shard.aliases) {
    if (saved == nullptr) saved = reader_.find(flat_name(make_path(alias)));
  }
  return saved;
}
const ShardedManifest::Tensor* TrainingCheckpointLoader::find_model(
    const LocalShard& shard) const {
  return find(shard,
              [&](const std::string& name) { return paths_.model(name); });
}
const ShardedManifest::Tensor* TrainingCheckpointLoader::find_state(
    const LocalShard& shard, const std::string& key) const {
  return find(shard, [&](const std::string& name) {
    return paths_.optimizer(name, key);
  });
}
const ShardedManifest::Tensor* TrainingCheckpointLoader::find_average(
    const LocalShard& shard) const {
  return find(shard, [&](const std::string& name) { return paths_.ema(name); });
}

absl::Status TrainingCheckpointLoader::check_tensor(
    const SavedTensor* saved, const Path& path,
    const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const std::string name = flat_name(path);
  if (saved == nullptr) {
    return absl::NotFoundError(
        absl::StrCat(reader_.folder(), ": '", name, "' is missing"));
  }
  known_.insert(name);
  if (saved->sizes != sizes) {
    return absl::InvalidArgumentError(
        absl::StrCat(reader_.folder(), ": '", name, "': expected shape ",
                     c10::str(at::IntArrayRef(sizes)), ", got ",
                     c10::str(at::IntArrayRef(saved->sizes))));
  }
  if (saved->dtype != dtype && !cast_dtypes_) {
    return absl::InvalidArgumentError(absl::StrCat(
        reader_.folder(), ": '", name, "': expected dtype ",
        c10::toString(dtype), ", got ", c10::toString(saved->dtype)));
  }
  return absl::OkStatus();
}

absl::Status TrainingCheckpointLoader::check_optimizer(
    const LocalShard& shard) {
  bool any = false;
  for (const std::string& key : optimizer_->state_names()) {
    any = any || find_state(shard, key) != nullptr;
  }
  const SavedTensor* const step = find_state(shard, TrainingPaths::kStep);
  if (step != nullptr) {
    any = true;
    FS_RETURN_IF_ERROR(
        check_tensor(step, paths_.optimizer(shard.name, TrainingPaths::kStep),
                     {}, at::kFloat));
  }
  if (!any) return absl::OkStatus();  // Never had a gradient.
  if (optimizer_->has_step() && step == nullptr) {
    return absl::NotFoundError(absl::StrCat(
        reader_.folder(), ": '",
        flat_name(paths_.optimizer(shard.name, TrainingPaths::kStep)),
        "' is missing"));
  }
  for (const std::string& key : optimizer_->state_names()) {
    FS_RETURN_IF_ERROR(check_tensor(find_state(shard, key),
                                    paths_.optimizer(shard.name, key),
                                    shard.sizes, shard.values.scalar_type()));
  }
  return absl::OkStatus();
}

// Without an optimizer its state is not looked at, nor without an EMA that.
absl::Status TrainingCheckpointLoader::check_for_unknown() const {
  for (const SavedTensor& tensor : reader_.manifest().tensors) {
    const bool concerns =
        paths_.is_model(tensor.path) ||
        (paths_.is_optimizer(tensor.path) && optimizer_ != nullptr) ||
        (paths_.is_ema(tensor.path) && ema_ != nullptr);
    if (!concerns) continue;
    bool known = known_.count(tensor.name()) != 0;
    for (const Path& alias : tensor.aliases) {
      known = known || known_.count(flat_name(alias)) != 0;
    }
    if (known) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        reader_.folder(), ": unexpected key '", tensor.name(), "': ",
        paths_.is_model(tensor.path) ? "the model has no tensor of that name"
        : paths_.is_ema(tensor.path) ? "no parameter of that name is averaged"
                                     : "the optimizer does not keep it"));
  }
  return absl::OkStatus();
}

absl::Status TrainingCheckpointLoader::fill(const SavedTensor& saved,
                                            const LocalShard& shard,
                                            const at::Tensor& values) const {
  if (values.numel() == 0) return absl::OkStatus();
  if (values.is_cpu()) {
    return reader_.read(saved, shard.order, shard.begin, values);
  }
  const at::Tensor host =
      at::empty(values.sizes(), values.options().device(at::kCPU));
  FS_RETURN_IF_ERROR(reader_.read(saved, shard.order, shard.begin, host));
  values.copy_(host);
  return absl::OkStatus();
}

absl::Status TrainingCheckpointLoader::load_optimizer() {
  for (LocalOptimizerState& state : states_) {
    const LocalShard& shard = shards_.at(state.name);
    bool any = false;
    for (auto& [key, tensor] : state.tensors) {
      const SavedTensor* const saved = find_state(shard, key);
      if (saved == nullptr) continue;
      any = true;
      FS_RETURN_IF_ERROR(fill(*saved, shard, as_parameter(shard, tensor)));
    }
    const SavedTensor* const step = find_state(shard, TrainingPaths::kStep);
    state.step = any ? 1 : 0;
    if (step != nullptr) {
      FS_ASSIGN_OR_RETURN(const at::Tensor value, reader_.tensor(*step));
      state.step = static_cast<int64_t>(value.item<double>());
    }
    if (!any && step == nullptr) state.tensors.clear();  // Starts afresh.
  }
  return optimizer_->load_local_state(states_);
}

}  // namespace fullshard::internal
