#include "fullshard/activation_ckpt/frame.h"

#include <algorithm>
#include <mutex>
#include <sstream>
#include <utility>

#include "ATen/autocast_mode.h"
#include "ATen/ops/empty_like.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "torch/csrc/autograd/engine.h"

namespace fullshard::internal {
namespace {

namespace ag = torch::autograd;

// Thrown by the recorder when it has what forward saved: the rest of the
// function would be work for nothing. Not a std::exception, so that no operator
// or user catches it by accident.
struct StopRecompute {};

class FrameHook final : public SavedTensorHook {
 public:
  explicit FrameHook(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    index_ = frame_->count_save(tensor);
  }
  at::Tensor call_unpack_hook() override { return frame_->unpack(index_); }

 private:
  const std::shared_ptr<Frame> frame_;
  size_t index_ = 0;
};

// Frames with a recording that is not used up, to be dropped when their
// backward ends.
class Leftovers final : public BackwardObserver {
 public:
  static Leftovers& instance() {
    static Leftovers* const leftovers = [] {
      auto* made = new Leftovers;
      made->observing_ = observe_backward(made);
      return made;
    }();
    return *leftovers;
  }

  void add(std::weak_ptr<Frame> frame, int task) {
    std::lock_guard<std::mutex> lock(mutex_);
    frames_.emplace_back(std::move(frame), task);
  }

  void before_backward(const std::vector<ag::Edge>&, bool, bool) override {}

  void after_backward(bool) override {
    std::vector<std::pair<std::weak_ptr<Frame>, int>> frames;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      frames.swap(frames_);
    }
    for (const auto& [weak, task] : frames) {
      if (std::shared_ptr<Frame> frame = weak.lock()) {
        frame->drop_recording(task);
      }
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<std::weak_ptr<Frame>, int>> frames_;
  std::shared_ptr<void> observing_;
};

// Restores on every way out.
template <class F>
class Finally {
 public:
  explicit Finally(F f) : f_(std::move(f)) {}
  ~Finally() { f_(); }
  Finally(const Finally&) = delete;
  Finally& operator=(const Finally&) = delete;

 private:
  F f_;
};

}  // namespace

AutocastState AutocastState::capture() {
  AutocastState state;
  std::vector<c10::DeviceType> types = {c10::kCPU};
  if (at::globalContext().hasCUDA()) types.push_back(c10::kCUDA);
  for (const c10::DeviceType type : types) {
    state.devices_.push_back({type, at::autocast::is_autocast_enabled(type),
                              at::autocast::get_autocast_dtype(type)});
  }
  state.cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::restore() const {
  for (const PerDevice& device : devices_) {
    at::autocast::set_autocast_enabled(device.type, device.enabled);
    at::autocast::set_autocast_dtype(device.type, device.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

// Keeps what the recomputed function saves, until there is enough.
class Frame::Recorder final : public HookFactory {
 public:
  Recorder(const Frame& frame, Recording& recording)
      : frame_(frame), recording_(recording) {}

  std::unique_ptr<ag::SavedVariableHooks> make_hook() override {
    return std::make_unique<Hook>(*this);
  }

 private:
  struct Hook final : SavedTensorHook {
    explicit Hook(Recorder& recorder) : recorder(recorder) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      std::vector<SavedTensor>& tensors = recorder.recording_.tensors;
      recorder.frame_.check_same(tensors.size(), tensor);
      tensors.emplace_back();
      tensors.back().pack(tensor);
      if (tensors.size() == recorder.frame_.num_saves_) throw StopRecompute();
    }
    at::Tensor call_unpack_hook() override {
      TORCH_CHECK(false, "a recomputed graph has no backward of its own");
    }
    Recorder& recorder;
  };

  const Frame& frame_;
  Recording& recording_;
};

std::shared_ptr<Frame> Frame::open(const std::vector<at::Tensor>& inputs,
                                   Rerun rerun,
                                   const CheckpointOptions& options) {
  install_engine();
  Leftovers::instance();
  auto frame = std::make_shared<Frame>();
  const bool offload = options.offload_inputs && !inside_hook_factory();
  for (const at::Tensor& input : inputs) {
    frame->inputs_.push_back(frame->keep(input, offload));
  }
  frame->rerun_ = std::move(rerun);
  frame->determinism_check_ = options.determinism_check;
  if (!options.name.empty()) {
    frame->where_ = absl::StrCat(" in '", options.name, "'");
  }
  if (options.keep != nullptr) frame->kept_.emplace(options.keep);
  if (options.preserve_rng_state) frame->rng_ = RngState::capture();
  frame->autocast_ = AutocastState::capture();
  return frame;
}

Frame::Input Frame::keep(const at::Tensor& input, bool offload) const {
  Input kept;
  kept.defined = input.defined();
  if (!kept.defined) return kept;
  kept.requires_grad = input.requires_grad();
  if (!offload) {
    kept.saved = ag::SavedVariable(input, /*is_output=*/false);
    return kept;
  }
  at::NoGradGuard no_grad;
  kept.device = input.device();
  kept.offloaded =
      at::empty_like(input, input.options().device(c10::kCPU).pinned_memory(
                                !kept.device.is_cpu()))
          .copy_(input, /*non_blocking=*/true);
  return kept;
}

std::string Frame::Look::to_string() const {
  std::ostringstream text;
  text << at::IntArrayRef(sizes) << " of " << dtype << " on " << device;
  return text.str();
}

size_t Frame::count_save(const at::Tensor& tensor) {
  if (determinism_check_) looks_.emplace_back(tensor);
  if (kept_.has_value()) kept_->note_save();
  return num_saves_++;
}

void Frame::check_same(size_t index, const at::Tensor& tensor) const {
  if (!determinism_check_) return;
  const Look& first = looks_[index];
  if (first.dtype == tensor.scalar_type() && first.device == tensor.device() &&
      tensor.sizes().equals(first.sizes)) {
    return;
  }
  TORCH_CHECK(false, "checkpoint()", where_, ": saved tensor ", index + 1,
              " of ", num_saves_, " is ", Look(tensor).to_string(),
              " in the recomputed function, but was ", first.to_string(),
              " in the first run; it must do the same both times");
}

std::unique_ptr<ag::SavedVariableHooks> Frame::make_hook() {
  return std::make_unique<FrameHook>(shared_from_this());
}

at::Tensor Frame::unpack(size_t index) {
  const int task = ag::get_current_graph_task_id();
  TORCH_CHECK(task >= 0,
              "a tensor saved inside checkpoint() was read outside of "
              "backward; it exists only while backward runs");
  Recording& current = recording(task);
  TORCH_CHECK(index < current.tensors.size(), "checkpoint()", where_,
              ": tensor ", index, " was used twice in one backward");
  at::Tensor tensor = current.tensors[index].unpack();
  if (--current.num_left == 0) drop_recording(task);
  return tensor;
}

Frame::Recording& Frame::recording(int task) {
  for (Recording& made : recordings_) {
    if (made.task == task) return made;
  }
  recordings_.emplace_back();
  Recording& made = recordings_.back();
  made.task = task;
  made.num_left = num_saves_;
  made.token = std::make_shared<char>();
  try {
    recompute(made);
  } catch (...) {
    recordings_.pop_back();
    throw;
  }
  Leftovers::instance().add(weak_from_this(), task);
  return made;
}

void Frame::recompute(Recording& recording) {
  std::vector<at::Tensor> inputs;
  for (const Input& input : inputs_) {
    inputs.push_back(!input.defined ? at::Tensor()
                     : input.offloaded.defined()
                         ? input.offloaded
                               .to(input.device, input.offloaded.scalar_type(),
                                   /*non_blocking=*/true)
                               .detach()
                         : input.saved.unpack().detach());
    if (input.defined) inputs.back().set_requires_grad(input.requires_grad);
  }
  const AutocastState outer_autocast = AutocastState::capture();
  std::optional<RngState> outer_rng;
  if (rng_.has_value()) outer_rng = RngState::capture();
  Finally restore([&] {
    outer_autocast.restore();
    if (outer_rng.has_value()) outer_rng->restore();
  });
  autocast_.restore();
  if (rng_.has_value()) rng_->restore();
  Recorder recorder(*this, recording);
  {
    HookFactoryGuard hooks(&recorder);
    KeptOutputs::Scope kept(kept_.has_value() ? &*kept_ : nullptr,
                            /*replay=*/true, &where_);
    RecomputeTokenGuard token(recording.token);
    at::AutoGradMode grad(true);
    try {
      rerun_(std::move(inputs));
    } catch (const StopRecompute&) {
    }
  }
  TORCH_CHECK(recording.tensors.size() == num_saves_, "checkpoint()", where_,
              ": the recomputed function saved ", recording.tensors.size(),
              " tensors, the first run saved ", num_saves_,
              "; it must do the same both times");
}

void Frame::drop_recording(int task) {
  recordings_.remove_if(
      [task](const Recording& made) { return made.task == task; });
}

}  // namespace fullshard::internal
