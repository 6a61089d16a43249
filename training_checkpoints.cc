#include "fullshard/training_checkpoints.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <unordered_map>
#include <utility>

#include "ATen/Context.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/max_over_ranks.h"
#include "fullshard/core/status.h"
#include "fullshard/io/atomic_file.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/sharding/sharded_state.h"
#include "fullshard/training_checkpoint_loader.h"
#include "fullshard/training_param_groups.h"

namespace fullshard {
namespace {

namespace fs = std::filesystem;

using Path = std::vector<std::string>;
using SavedTensor = ShardedManifest::Tensor;

constexpr char kStep[] = "step";

Path rng_path(int rank, c10::DeviceType device) {
  return {"rng", absl::StrCat(rank),
          c10::DeviceTypeName(device, /*lower_case=*/true)};
}

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

bool is_saved(const ShardedOptimizer& optimizer,
              const LocalOptimizerState& state) {
  return state.step > 0 || optimizer.has_state_at_step_0();
}

void restore_random_state(const ShardedCheckpointReader& reader,
                          const ProcessGroups& groups) {
  if (reader.manifest().world_size != groups.world_size()) return;
  for (const c10::Device device : random_devices(groups.device())) {
    const SavedTensor* const saved =
        reader.find(flat_name(rng_path(groups.rank(), device.type())));
    if (saved == nullptr) continue;
    const auto state = reader.tensor(*saved);
    if (state.ok()) generator_of(device).set_state(*state);
  }
}

}  // namespace

TrainingCheckpoints::TrainingCheckpoints(
    std::string folder, ShardedModule& model, ShardedOptimizer* optimizer,
    const TrainingCheckpointsOptions& options)
    : folder_(std::move(folder)),
      model_(model),
      optimizer_(optimizer),
      options_(options),
      file_system_(options.file_system != nullptr ? *options.file_system
                                                  : FileSystem::posix()) {
  model_.state()->add_observer(this);
}

TrainingCheckpoints::~TrainingCheckpoints() {
  if (const absl::Status status = wait(); !status.ok()) {
    log_error(absl::StrCat("a checkpoint was not saved: ", status.message()));
  }
  model_.state()->remove_observer(this);
}

absl::StatusOr<std::string> TrainingCheckpoints::save(int64_t step,
                                                      const State& state) {
  return start(step, state, /*async=*/false);
}

absl::StatusOr<std::string> TrainingCheckpoints::save_async(
    int64_t step, const State& state) {
  return start(step, state, /*async=*/true);
}

void TrainingCheckpoints::wait_for_copy() {
  if (copied_.valid()) copied_.wait();
}

absl::Status TrainingCheckpoints::wait() {
  if (thread_.joinable()) thread_.join();
  return std::exchange(result_, absl::OkStatus());
}

absl::StatusOr<std::string> TrainingCheckpoints::start(int64_t step,
                                                       const State& state,
                                                       bool async) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  const ProcessGroups& groups = model_.groups();
  const std::string folder = absl::StrCat(folder_, "/", step_folder_name(step));
  if (options_.ema != nullptr && options_.ema->swapped_in()) {
    return absl::FailedPreconditionError(
        absl::StrCat("save of ", folder,
                     " while the average is swapped in: call swap_out() "
                     "before"));
  }
  try {
    // No rank may still be at a save before this one when the hidden folder is
    // made: it may have the same name.
    FS_RETURN_IF_ERROR(agree(groups, wait(), folder));
    FS_RETURN_IF_ERROR(
        agree(groups,
              groups.rank() == 0
                  ? ShardedCheckpointWriter::prepare(folder, file_system_)
                  : absl::OkStatus(),
              folder));
    std::vector<ShardToSave> shards = collect(async);
    std::vector<ObjectToSave> objects;
    if (optimizer_ != nullptr && groups.rank() == 0) {
      objects =
          internal::param_groups_to_save(*optimizer_, options_.optimizer_key);
    }
    if (!async) {
      const absl::Status status =
          write(folder, step, absl::OkStatus(), shards, state, objects);
      // Until then rank 0 replaces the link and removes old ones.
      max_over_ranks(groups, 0, "all_reduce after a save");
      FS_RETURN_IF_ERROR(status);
      return folder;
    }
    start_thread(folder, step, state, std::move(shards), std::move(objects));
    return folder;
  } catch (const c10::Error& error) {
    return absl::UnavailableError(
        absl::StrCat("save: ", error.what_without_backtrace()));
  }
}

void TrainingCheckpoints::start_thread(const std::string& folder, int64_t step,
                                       const State& state,
                                       std::vector<ShardToSave> shards,
                                       std::vector<ObjectToSave> objects) {
  std::vector<Copy> copies = move_to_buffer(shards);
  std::promise<void> copied;
  copied_ = copied.get_future();
  thread_ = std::thread([this, folder, step, state, copies = std::move(copies),
                         copied = std::move(copied), shards = std::move(shards),
                         objects = std::move(objects)]() mutable {
    try {
      const absl::Status status = run(copies);
      copies.clear();
      copied.set_value();
      result_ = write(folder, step, status, shards, state, objects);
    } catch (const std::exception& error) {
      result_ = absl::InternalError(
          absl::StrCat("save of ", folder, ": ", error.what()));
    }
  });
  if (!options_.copy_in_background) wait_for_copy();
}

std::vector<ShardToSave> TrainingCheckpoints::collect(bool async) const {
  const ProcessGroups& groups = model_.groups();
  const internal::TrainingPaths paths(options_);
  std::vector<ShardToSave> shards;
  const std::vector<LocalShard> locals = model_.local_shards();
  std::unordered_map<std::string, const LocalShard*> by_name;
  for (const LocalShard& local : locals) {
    by_name[local.name] = &local;
    if (!local.own_turn) continue;
    shards.push_back(part(local, paths.model(local.name), local.values));
    for (const std::string& alias : local.aliases) {
      shards.back().aliases.push_back(paths.model(alias));
    }
  }
  const std::vector<LocalOptimizerState> states =
      optimizer_ == nullptr ? std::vector<LocalOptimizerState>()
                            : optimizer_->local_state();
  for (const LocalOptimizerState& state : states) {
    const LocalShard& local = *by_name.at(state.name);
    if (!local.own_turn || !is_saved(*optimizer_, state)) continue;
    for (const auto& [key, tensor] : state.tensors) {
      shards.push_back(part(local, paths.optimizer(state.name, key),
                            internal::as_parameter(local, tensor)));
    }
    if (optimizer_->has_step() && local.begin == 0 &&
        local.values.numel() > 0) {
      shards.push_back(
          whole(paths.optimizer(state.name, kStep),
                at::full({}, static_cast<double>(state.step), at::kFloat)));
    }
  }
  if (options_.ema != nullptr) {
    for (const auto& [name, average] : options_.ema->local_averages()) {
      const LocalShard& local = *by_name.at(name);
      if (!local.own_turn) continue;
      shards.push_back(
          part(local, paths.ema(name), internal::as_parameter(local, average)));
      for (const std::string& alias : local.aliases) {
        shards.back().aliases.push_back(paths.ema(alias));
      }
    }
  }
  if (groups.rank() == 0) {
    for (const auto& [name, tensor] : model_.whole_tensors()) {
      // Forward writes to buffers.
      shards.push_back(
          whole(paths.model(name), async ? tensor.clone() : tensor));
    }
  }
  for (const c10::Device device : random_devices(groups.device())) {
    shards.push_back(whole(rng_path(groups.rank(), device.type()),
                           generator_of(device).get_state()));
  }
  return shards;
}

std::vector<TrainingCheckpoints::Copy> TrainingCheckpoints::move_to_buffer(
    std::vector<ShardToSave>& shards) {
  constexpr int64_t kAlignment = 64;
  const auto padded = [](const at::Tensor& values) {
    return (static_cast<int64_t>(values.nbytes()) + kAlignment - 1) /
           kAlignment * kAlignment;
  };
  int64_t num_bytes = 0;
  for (const ShardToSave& shard : shards) num_bytes += padded(shard.values);
  if (!buffer_.defined() || buffer_.numel() < num_bytes) {
    buffer_ = at::Tensor();
    buffer_ = at::empty({num_bytes}, at::kByte);
  }
  int64_t at = 0;
  std::vector<Copy> copies;
  for (ShardToSave& shard : shards) {
    const int64_t size = static_cast<int64_t>(shard.values.nbytes());
    const at::Tensor to =
        buffer_.narrow(0, at, size).view(shard.values.scalar_type());
    at += padded(shard.values);
    const uint32_t version = shard.values._version();
    copies.push_back(
        {flat_name(shard.path), std::exchange(shard.values, to), to, version});
  }
  return copies;
}

absl::Status TrainingCheckpoints::run(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    std::memcpy(copy.to.mutable_data_ptr(), copy.from.const_data_ptr(),
                copy.from.nbytes());
  }
  for (const Copy& copy : copies) {
    if (copy.from._version() == copy.version) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("'", copy.name,
                     "' was changed while save_async() copied it: call "
                     "wait_for_copy() before, or unset copy_in_background"));
  }
  return absl::OkStatus();
}

absl::Status TrainingCheckpoints::write(
    const std::string& folder, int64_t step, const absl::Status& copied,
    const std::vector<ShardToSave>& shards, const State& state,
    const std::vector<ObjectToSave>& objects) const {
  const ProcessGroups& groups = model_.groups();
  State full = state;
  full[kStep] = absl::StrCat(step);
  ShardedCheckpointWriter writer(folder, groups.rank(), groups.world_size(),
                                 options_.timeout, file_system_);
  FS_RETURN_IF_ERROR(copied.ok() ? writer.write(shards, full, objects)
                                 : writer.give_up(copied));
  if (groups.rank() != 0) return absl::OkStatus();
  const absl::Status linked = replace_symlink(
      step_folder_name(step), absl::StrCat(folder_, "/latest"), file_system_);
  if (!linked.ok()) {
    log_warning(absl::StrCat(folder,
                             " is saved, but 'latest' does not point "
                             "at it: ",
                             linked.message()));
  }
  remove_old(step);
  return absl::OkStatus();
}

// Only ever after a newer one is complete.
void TrainingCheckpoints::remove_old(int64_t step) const {
  if (options_.keep_last <= 0) return;
  int64_t kept = 0;
  for (const std::string& path : list_step_folders(folder_)) {
    int64_t number = -1;
    const std::string name = fs::path(path).filename().string();
    if (!absl::SimpleAtoi(absl::StripPrefix(name, "step-"), &number)) continue;
    // Later ones are of a run that went on from an earlier step; they count,
    // but the one just saved is never removed.
    if (number == step || ++kept < options_.keep_last) continue;
    if (number > step) continue;
    if (options_.keep_every > 0 && number % options_.keep_every == 0) continue;
    std::error_code error;
    fs::remove_all(path, error);
    if (error) {
      log_warning(absl::StrCat("cannot remove ", path, ": ", error.message()));
    }
  }
}

absl::StatusOr<TrainingCheckpoints::State> TrainingCheckpoints::load(
    const std::string& checkpoint) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  const ProcessGroups& groups = model_.groups();
  try {
    absl::Status status = wait();
    std::unique_ptr<ShardedCheckpointReader> reader;
    std::unique_ptr<internal::TrainingCheckpointLoader> loader;
    if (status.ok()) {
      auto opened = ShardedCheckpointReader::open(checkpoint);
      status = opened.status();
      if (opened.ok()) reader = std::move(opened).value();
    }
    if (status.ok()) {
      loader = std::make_unique<internal::TrainingCheckpointLoader>(
          *reader, model_, optimizer_, options_);
      status = loader->check();
    }
    FS_RETURN_IF_ERROR(agree(groups, status, checkpoint));
    FS_RETURN_IF_ERROR(agree(groups, loader->load(), checkpoint));
    restore_random_state(*reader, groups);
    return reader->manifest().state;
  } catch (const c10::Error& error) {
    return absl::UnavailableError(
        absl::StrCat("load: ", error.what_without_backtrace()));
  }
}

}  // namespace fullshard
