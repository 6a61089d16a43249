// What a training run saves to go on from, and how it goes on.

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/status.h"
#include "fullshard/strategy.h"

namespace fullshard {
namespace {

using State = TrainingCheckpoints::State;

std::string exact(double value) { return absl::StrFormat("%.17g", value); }

// Reads values of a checkpoint's state, with the first thing that is wrong.
class StateReader {
 public:
  StateReader(const State& state, const std::string& checkpoint)
      : state_(state), checkpoint_(checkpoint) {}

  int64_t integer(const char* key) {
    int64_t value = 0;
    const std::string* const text = find(key);
    if (text != nullptr && !absl::SimpleAtoi(*text, &value)) {
      fail(absl::StrCat("'", key, "': expected an integer, got '", *text, "'"));
    }
    return value;
  }
  double number(const char* key) {
    double value = 0;
    const std::string* const text = find(key);
    if (text != nullptr && !absl::SimpleAtod(*text, &value)) {
      fail(absl::StrCat("'", key, "': expected a number, got '", *text, "'"));
    }
    return value;
  }
  // A setting that must be what it was.
  void same(const char* key, const std::string& now) {
    const std::string* const text = find(key);
    if (text != nullptr && *text != now) {
      fail(absl::StrCat(key, ": the run was started with ", *text,
                        ", expected the same, got ", now));
    }
  }
  const absl::Status& status() const { return status_; }

 private:
  const std::string* find(const char* key) {
    const auto found = state_.find(key);
    if (found != state_.end()) return &found->second;
    fail(absl::StrCat("'", key, "' is missing; was it saved by run_training?"));
    return nullptr;
  }
  void fail(const std::string& what) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat(checkpoint_, ": ", what));
  }

  const State& state_;
  const std::string& checkpoint_;
  absl::Status status_;
};

}  // namespace

absl::Status Strategy::save_progress(bool async) {
  if (progress_.global_step == saved_step_) return absl::OkStatus();
  saved_step_ = progress_.global_step;
  State state = {{"epoch", absl::StrCat(progress_.epoch)},
                 {"steps_in_epoch", absl::StrCat(progress_.steps_in_epoch)},
                 {"last_loss", exact(progress_.last_loss)},
                 // What decides the order of the data.
                 {"seed", absl::StrCat(config_.seed)},
                 {"global_batch_size", absl::StrCat(config_.global_batch_size)},
                 {"num_examples", absl::StrCat(n_train_examples_)},
                 // For people.
                 {"stage", config_.stage},
                 {"lr_scheduler_type", config_.lr_scheduler_type},
                 {"total_steps", absl::StrCat(total_steps_)}};
  if (scaler_ != nullptr) {
    const ShardedGradScaler::State scaler = scaler_->state();
    state["loss_scale"] = exact(scaler.scale);
    state["loss_scale_growth_tracker"] = absl::StrCat(scaler.growth_tracker);
  }
  return (async ? checkpoints_->save_async(progress_.global_step, state)
                : checkpoints_->save(progress_.global_step, state))
      .status();
}

absl::Status Strategy::resume(const std::string& checkpoint) {
  if (!sharded_.has_value()) {
    return absl::FailedPreconditionError("resume before run_setup");
  }
  TrainingCheckpoints checkpoints("", *sharded_, optimizer_.get());
  FS_ASSIGN_OR_RETURN(const State state, checkpoints.load(checkpoint));
  StateReader reader(state, checkpoint);
  Progress progress;
  progress.global_step = reader.integer("step");
  progress.epoch = reader.integer("epoch");
  progress.steps_in_epoch = reader.integer("steps_in_epoch");
  progress.last_loss = reader.number("last_loss");
  reader.same("seed", absl::StrCat(config_.seed));
  reader.same("global_batch_size", absl::StrCat(config_.global_batch_size));
  reader.same("num_examples", absl::StrCat(n_train_examples_));
  if (scaler_ != nullptr) {
    ShardedGradScaler::State scaler;
    scaler.scale = reader.number("loss_scale");
    scaler.growth_tracker = reader.integer("loss_scale_growth_tracker");
    if (reader.status().ok()) scaler_->load_state(scaler);
  }
  FS_RETURN_IF_ERROR(reader.status());
  progress_ = progress;
  if (groups_.rank() == 0) {
    log_info(absl::StrCat("resumed from ", checkpoint, ": step ",
                          progress_.global_step, " of ", total_steps_,
                          ", epoch ", progress_.epoch));
  }
  return absl::OkStatus();
}

}  // namespace fullshard
