#include "fullshard/training_checkpoint_contents.h"

#include <unordered_map>
#include <utility>

#include "ATen/Context.h"
#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/status.h"

namespace fullshard::internal {
namespace {

using Path = TrainingPaths::Path;

std::vector<c10::Device> random_devices(c10::Device compute) {
  std::vector<c10::Device> devices = {c10::kCPU};
  if (!compute.is_cpu()) devices.push_back(compute);
  return devices;
}

at::Generator generator_of(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.to(at::kCPU).contiguous().view({-1});
}

ShardToSave whole(Path path, const at::Tensor& tensor) {
  ShardToSave shard;
  shard.path = std::move(path);
  shard.sizes = tensor.sizes().vec();
  for (size_t i = 0; i < shard.sizes.size(); ++i) {
    shard.order.push_back(static_cast<int64_t>(i));
  }
  shard.values = on_host(tensor);
  return shard;
}

ShardToSave part(const LocalShard& local, Path path, const at::Tensor& values) {
  ShardToSave shard;
  shard.path = std::move(path);
  shard.sizes = local.sizes;
  shard.order = local.order;
  shard.begin = local.begin;
  shard.values = on_host(values);
  return shard;
}

class Collector {
 public:
  Collector(const ShardedModule& model,
            const TrainingCheckpointsOptions& options)
      : model_(model), paths_(options), locals_(model.local_shards()) {
    for (const LocalShard& local : locals_) by_name_[local.name] = &local;
  }

  void add_parameters() {
    for (const LocalShard& local : locals_) {
      if (!local.own_turn) continue;
      shards_.push_back(part(local, paths_.model(local.name), local.values));
      for (const std::string& alias : local.aliases) {
        shards_.back().aliases.push_back(paths_.model(alias));
      }
    }
  }

  void add_optimizer(const ShardedOptimizer& optimizer) {
    for (const LocalOptimizerState& state : optimizer.local_state()) {
      const LocalShard& local = *by_name_.at(state.name);
      const bool is_saved = state.step > 0 || optimizer.has_state_at_step_0();
      if (!local.own_turn || !is_saved) continue;
      for (const auto& [key, tensor] : state.tensors) {
        shards_.push_back(part(local, paths_.optimizer(state.name, key),
                               as_parameter(local, tensor)));
      }
      const bool has_first = local.begin == 0 && local.values.numel() > 0;
      if (optimizer.has_step() && has_first) {
        shards_.push_back(
            whole(paths_.optimizer(state.name, TrainingPaths::kStep),
                  at::full({}, static_cast<double>(state.step), at::kFloat)));
      }
    }
  }

  void add_averages(const ShardedEma& ema) {
    for (const auto& [name, average] : ema.local_averages()) {
      const LocalShard& local = *by_name_.at(name);
      if (!local.own_turn) continue;
      shards_.push_back(
          part(local, paths_.ema(name), as_parameter(local, average)));
      for (const std::string& alias : local.aliases) {
        shards_.back().aliases.push_back(paths_.ema(alias));
      }
    }
  }

  void add_whole_tensors(bool copies) {
    for (const auto& [name, tensor] : model_.whole_tensors()) {
      shards_.push_back(
          whole(paths_.model(name), copies ? tensor.clone() : tensor));
    }
  }

  void add_random_states() {
    const ProcessGroups& groups = model_.groups();
    for (const c10::Device device : random_devices(groups.device())) {
      shards_.push_back(whole(paths_.random_state(groups.rank(), device.type()),
                              generator_of(device).get_state()));
    }
  }

  std::vector<ShardToSave> take() { return std::move(shards_); }

 private:
  const ShardedModule& model_;
  const TrainingPaths paths_;
  const std::vector<LocalShard> locals_;
  std::unordered_map<std::string, const LocalShard*> by_name_;
  std::vector<ShardToSave> shards_;
};

}  // namespace

Path TrainingPaths::random_state(int rank, c10::DeviceType device) {
  return {kRandomStates, absl::StrCat(rank),
          c10::DeviceTypeName(device, /*lower_case=*/true)};
}

std::vector<ShardToSave> collect_contents(
    const ShardedModule& model, const ShardedOptimizer* optimizer,
    const TrainingCheckpointsOptions& options, bool copies_whole_tensors) {
  Collector collector(model, options);
  collector.add_parameters();
  if (optimizer != nullptr) collector.add_optimizer(*optimizer);
  if (options.ema != nullptr) collector.add_averages(*options.ema);
  if (model.groups().rank() == 0) {
    collector.add_whole_tensors(copies_whole_tensors);
  }
  collector.add_random_states();
  return collector.take();
}

absl::Status restore_random_states(const ShardedCheckpointReader& reader,
                                   const ProcessGroups& groups) {
  if (reader.is_of_python()) return absl::OkStatus();  // Has none.
  if (reader.manifest().world_size != groups.world_size()) {
    return absl::OkStatus();
  }
  for (const c10::Device device : random_devices(groups.device())) {
    const std::string name =
        flat_name(TrainingPaths::random_state(groups.rank(), device.type()));
    const auto* const saved = reader.find(name);
    if (saved == nullptr) {
      log_warning(absl::StrCat(reader.folder(), ": '", name,
                               "' is missing: random numbers go on from where "
                               "they are"));
      continue;
    }
    FS_ASSIGN_OR_RETURN(const at::Tensor state, reader.tensor(*saved));
    generator_of(device).set_state(state);
  }
  return absl::OkStatus();
}

}  // namespace fullshard::internal
