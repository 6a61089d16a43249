#ifndef FULLSHARD_ACTIVATION_CKPT_FRAME_H_
#define FULLSHARD_ACTIVATION_CKPT_FRAME_H_

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
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
                                     Rerun rerun, bool preserve_rng_state);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hook() override;

  size_t count_save() { return num_saves_++; }
  at::Tensor unpack(size_t index);
  void drop_recording(int task);

 private:
  struct Input {
    torch::autograd::SavedVariable saved;
    bool defined = false;
    bool requires_grad = false;
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

  std::vector<Input> inputs_;
  Rerun rerun_;
  std::optional<RngState> rng_;
  AutocastState autocast_;
  size_t num_saves_ = 0;
  std::list<Recording> recordings_;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_ACTIVATION_CKPT_FRAME_H_
