#ifndef FULLSHARD_ACTIVATION_CKPT_FRAME_H_
#define FULLSHARD_ACTIVATION_CKPT_FRAME_H_

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/util/SmallVector.h"
#include "fullshard/activation_ckpt/checkpoint_options.h"
#include "fullshard/activation_ckpt/kept_outputs.h"
#include "fullshard/activation_ckpt/rng_state.h"
#include "fullshard/core/saved_tensor_hooks.h"
#include "torch/csrc/autograd/saved_variable.h"

namespace fullshard::internal {

// Autocast as a region was run: backward usually runs outside of it.
class AutocastState {
 public:
  static AutocastState capture();
  void restore() const;

 private:
  struct PerDevice {
    c10::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  std::vector<PerDevice> devices_;
  bool cache_enabled_ = true;
};

// One run of a checkpointed function. What autograd saves inside it is only
// counted; the first unpack in backward runs the function again on the saved
// inputs and keeps what that saves.
//
// [Note: Recordings]
// A recording belongs to one graph task, so that a retained or partial backward
// never meets another's tensors. It is dropped when all its tensors have been
// used, else at the end of the backward. It owns the token of
// [Note: Units kept for a recompute].
class Frame final : public HookFactory,
                    public std::enable_shared_from_this<Frame> {
 public:
  // `rerun` calls the function on these inputs and drops the result.
  using Rerun = std::function<void(std::vector<at::Tensor> inputs)>;

  // Saves `inputs` through the enclosing frame's hooks, if there is one.
  static std::shared_ptr<Frame> open(const std::vector<at::Tensor>& inputs,
                                     Rerun rerun,
                                     const CheckpointOptions& options);

  // Alive while the function runs for the first time.
  class FirstRun {
   public:
    explicit FirstRun(Frame& frame) : frame_(frame), hooks_(&frame) {
      // An enclosing frame's goes on if this one keeps nothing.
      if (frame.kept_.has_value()) {
        kept_.emplace(&*frame.kept_, /*replay=*/false, &frame.where_);
      }
    }

    ~FirstRun() {
      if (frame_.kept_.has_value()) frame_.kept_->first_run_ended();
    }
    FirstRun(const FirstRun&) = delete;
    FirstRun& operator=(const FirstRun&) = delete;

   private:
    Frame& frame_;
    const HookFactoryGuard hooks_;
    std::optional<KeptOutputs::Scope> kept_;
  };
  // The first run returned `tensor`, whose memory others may write to.
  void note_result(const at::Tensor& tensor) {
    if (kept_.has_value()) kept_->unshare(tensor);
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hook() override;

  // Returns the index of this save.
  size_t count_save(const at::Tensor& tensor);
  at::Tensor unpack(size_t index);
  void drop_recording(int task);

 private:
  struct Input {
    torch::autograd::SavedVariable saved;
    at::Tensor offloaded;  // In place of it, with where it was.
    c10::Device device = c10::kCPU;
    bool defined = false;
    bool requires_grad = false;
  };
  // Of a tensor that the first run saved.
  struct Look {
    explicit Look(const at::Tensor& tensor)
        : sizes(tensor.sizes().begin(), tensor.sizes().end()),
          dtype(tensor.scalar_type()),
          device(tensor.device()) {}
    std::string to_string() const;
    c10::SmallVector<int64_t, 5> sizes;
    at::ScalarType dtype;
    c10::Device device;
  };
  struct Recording {
    int task = -1;
    std::vector<SavedTensor> tensors;
    size_t num_left = 0;
    std::shared_ptr<void> token;
  };
  class Recorder;

  Recording& recording(int task);
  void recompute(Recording& recording);
  Input keep(const at::Tensor& input, bool offload) const;
  void check_same(size_t index, const at::Tensor& tensor) const;

  std::vector<Input> inputs_;
  Rerun rerun_;
  std::string where_;  // " in 'name'", for messages.
  bool determinism_check_ = true;
  std::vector<Look> looks_;  // By save, with the check.
  std::optional<KeptOutputs> kept_;
  std::optional<RngState> rng_;
  AutocastState autocast_;
  size_t num_saves_ = 0;
  std::list<Recording> recordings_;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_ACTIVATION_CKPT_FRAME_H_
