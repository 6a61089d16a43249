#include "fullshard/training_checkpoints.h"

#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/catch_errors.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/max_over_ranks.h"
#include "fullshard/core/status.h"
#include "fullshard/io/atomic_file.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/sharding/sharded_state.h"
#include "fullshard/training_checkpoint_contents.h"
#include "fullshard/training_checkpoint_loader.h"
#include "fullshard/training_param_groups.h"

namespace fullshard {
namespace {

namespace fs = std::filesystem;

// A shard's values, where they go, and which version of them.
struct Copy {
  std::string name;
  at::Tensor from, to;
  uint32_t version = 0;
};

absl::Status copy_all(const std::vector<Copy>& copies) {
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

void check(const TrainingCheckpointsOptions& options) {
  const std::set<std::string> keys = {options.model_key, options.optimizer_key,
                                      internal::TrainingPaths::kEma,
                                      internal::TrainingPaths::kRandomStates};
  TORCH_CHECK(keys.size() == 4 && keys.count("") == 0,
              "TrainingCheckpoints: model_key '", options.model_key,
              "' and optimizer_key '", options.optimizer_key,
              "': expected two different keys, neither empty, 'ema' nor 'rng'");
  TORCH_CHECK(options.keep_last >= 0 && options.keep_every >= 0,
              "TrainingCheckpoints: keep_last ", options.keep_last,
              ", keep_every ", options.keep_every, ": expected 0 or more");
  TORCH_CHECK(options.timeout.count() > 0, "TrainingCheckpoints: timeout ",
              options.timeout.count(), " ms: expected more than 0");
}

}  // namespace

// What is being saved.
struct TrainingCheckpoints::Save {
  std::string folder;
  int64_t step = 0;
  State state;
  std::vector<ShardToSave> shards;
  std::vector<ObjectToSave> objects;
  std::vector<Copy> copies;  // That a thread still has to make.
  std::promise<void> copied;
};

TrainingCheckpoints::TrainingCheckpoints(
    std::string folder, ShardedModule& model, ShardedOptimizer* optimizer,
    const TrainingCheckpointsOptions& options)
    : folder_(std::move(folder)),
      model_(model),
      optimizer_(optimizer),
      options_(options),
      file_system_(options.file_system != nullptr ? *options.file_system
                                                  : FileSystem::posix()),
      sharded_state_(model.state()) {
  check(options);
  TORCH_CHECK(
      optimizer == nullptr || optimizer->sharded_state() == sharded_state_,
      "TrainingCheckpoints: the optimizer is of another model");
  TORCH_CHECK(
      options.ema == nullptr || options.ema->sharded_state() == sharded_state_,
      "TrainingCheckpoints: the average is of another model");
  sharded_state_->add_observer(this);
}

TrainingCheckpoints::~TrainingCheckpoints() {
  if (const absl::Status status = wait(); !status.ok()) {
    log_error(absl::StrCat("a checkpoint was not saved: ", status.message()));
  }
  sharded_state_->remove_observer(this);
}

absl::StatusOr<std::string> TrainingCheckpoints::save(int64_t step,
                                                      const State& state) {
  return start_save(step, state, /*async=*/false);
}

absl::StatusOr<std::string> TrainingCheckpoints::save_async(
    int64_t step, const State& state) {
  return start_save(step, state, /*async=*/true);
}

void TrainingCheckpoints::wait_for_copy() {
  if (copied_.valid()) copied_.wait();
}

absl::Status TrainingCheckpoints::wait() {
  if (thread_.joinable()) thread_.join();
  return std::exchange(result_, absl::OkStatus());
}

absl::StatusOr<std::string> TrainingCheckpoints::start_save(int64_t step,
                                                            const State& state,
                                                            bool async) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  const ProcessGroups& groups = model_.groups();
  const std::string folder = absl::StrCat(folder_, "/", step_folder_name(step));
  return catch_errors("save", [&]() -> absl::StatusOr<std::string> {
    // No rank may still be at a save before this one when the hidden folder is
    // made: it may have the same name.
    FS_RETURN_IF_ERROR(agree(groups, wait(), last_saved_));
    last_saved_ = folder;
    auto save = std::make_shared<Save>();
    save->folder = folder;
    save->step = step;
    save->state = state;
    save->state[internal::TrainingPaths::kStep] = absl::StrCat(step);
    const absl::Status prepared =
        catch_errors(folder, [&] { return prepare(*save, async); });
    if (absl::Status all = agree(groups, prepared, folder); !all.ok()) {
      std::error_code ignored;
      if (groups.rank() == 0) {
        fs::remove(ShardedCheckpointWriter::temporary_folder(folder), ignored);
      }
      return all;
    }
    if (async) {
      start_thread(std::move(save));
      return folder;
    }
    // Until all agree rank 0 replaces the link and removes old ones.
    FS_RETURN_IF_ERROR(agree(groups, write(*save, absl::OkStatus()), folder));
    return folder;
  });
}

absl::Status TrainingCheckpoints::prepare(Save& save, bool async) {
  if (options_.ema != nullptr && options_.ema->swapped_in()) {
    return absl::FailedPreconditionError(
        absl::StrCat("save of ", save.folder,
                     " while the average is swapped in: call swap_out() "
                     "before"));
  }
  save.shards = internal::collect_contents(model_, optimizer_, options_, async);
  if (async) move_to_buffer(save);
  if (model_.groups().rank() != 0) return absl::OkStatus();
  if (optimizer_ != nullptr) {
    save.objects =
        internal::param_groups_to_save(*optimizer_, options_.optimizer_key);
  }
  return ShardedCheckpointWriter::prepare(save.folder, file_system_);
}

void TrainingCheckpoints::move_to_buffer(Save& save) {
  constexpr int64_t kAlignment = 64;
  const auto padded = [](const at::Tensor& values) {
    return (static_cast<int64_t>(values.nbytes()) + kAlignment - 1) /
           kAlignment * kAlignment;
  };
  int64_t num_bytes = 0;
  for (const ShardToSave& shard : save.shards) {
    num_bytes += padded(shard.values);
  }
  if (!buffer_.defined() || buffer_.numel() < num_bytes) {
    buffer_ = at::Tensor();
    buffer_ = at::empty({num_bytes}, at::kByte);
  }
  int64_t at = 0;
  for (ShardToSave& shard : save.shards) {
    const int64_t size = static_cast<int64_t>(shard.values.nbytes());
    const at::Tensor to =
        buffer_.narrow(0, at, size).view(shard.values.scalar_type());
    at += padded(shard.values);
    const uint32_t version = shard.values._version();
    save.copies.push_back(
        {flat_name(shard.path), std::exchange(shard.values, to), to, version});
  }
}

void TrainingCheckpoints::start_thread(std::shared_ptr<Save> save) {
  copied_ = save->copied.get_future().share();
  const auto copy_and_write = [this, save = std::move(save)] {
    const absl::Status status =
        catch_errors(save->folder, [&] { return copy_all(save->copies); });
    save->copies.clear();
    save->copied.set_value();
    result_ = write(*save, status);
  };
  try {
    thread_ = std::thread(copy_and_write);
  } catch (const std::system_error& error) {
    log_warning(absl::StrCat(last_saved_, " is saved before training goes on, ",
                             "for there is no thread: ", error.what()));
    copy_and_write();
  }
  if (!options_.copy_in_background) wait_for_copy();
}

// Comes to an end with the other ranks, whatever happens on this one.
absl::Status TrainingCheckpoints::write(const Save& save,
                                        const absl::Status& copied) const {
  const ProcessGroups& groups = sharded_state_->groups();
  ShardedCheckpointWriter writer(save.folder, groups.rank(),
                                 groups.world_size(), options_.timeout,
                                 file_system_);
  FS_RETURN_IF_ERROR(copied.ok()
                         ? writer.write(save.shards, save.state, save.objects)
                         : writer.give_up(copied));
  if (groups.rank() != 0) return absl::OkStatus();
  const absl::Status linked =
      replace_symlink(step_folder_name(save.step),
                      absl::StrCat(folder_, "/latest"), file_system_);
  if (!linked.ok()) {
    log_warning(absl::StrCat(
        save.folder,
        " is saved, but 'latest' does not point at it: ", linked.message()));
  }
  remove_old(save.step);
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
  return catch_errors("load", [&]() -> absl::StatusOr<State> {
    if (const absl::Status saved = wait(); !saved.ok()) {
      log_error(absl::StrCat("a checkpoint was not saved: ", saved.message()));
    }
    std::unique_ptr<ShardedCheckpointReader> reader;
    std::unique_ptr<internal::TrainingCheckpointLoader> loader;
    const absl::Status fits = catch_errors(checkpoint, [&]() -> absl::Status {
      FS_ASSIGN_OR_RETURN(reader, ShardedCheckpointReader::open(checkpoint));
      loader = std::make_unique<internal::TrainingCheckpointLoader>(
          *reader, model_, optimizer_, options_);
      return loader->check();
    });
    FS_RETURN_IF_ERROR(agree(groups, fits, checkpoint));
    const absl::Status loaded = catch_errors(checkpoint, [&]() -> absl::Status {
      FS_RETURN_IF_ERROR(loader->load());
      return internal::restore_random_states(*reader, groups);
    });
    FS_RETURN_IF_ERROR(agree(groups, loaded, checkpoint));
    return reader->manifest().state;
  });
}

}  // namespace fullshard
