#ifndef FULLSHARD_ACTIVATION_CKPT_CHECKPOINTABLE_H_
#define FULLSHARD_ACTIVATION_CKPT_CHECKPOINTABLE_H_

#include <functional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "fullshard/activation_ckpt/checkpoint.h"

namespace torch::nn {
class Module;
}

namespace fullshard {

// The switch that apply_activation_checkpointing() turns.
class CheckpointSwitch {
 public:
  void set_activation_checkpointing(bool on) { on_ = on; }
  bool activation_checkpointing() const { return on_; }

 protected:
  ~CheckpointSwitch() = default;

 private:
  bool on_ = false;
};

// Mixes a switchable activation checkpoint into a module class M. It wraps
// nothing, so names of parameters do not change.
//
// Example:
//   class BlockImpl : public torch::nn::Module,
//                     public Checkpointable<BlockImpl> {
//    public:
//     at::Tensor forward(const at::Tensor& x) {
//       return checkpointed(&BlockImpl::run, x);
//     }
//    private:
//     friend class Checkpointable<BlockImpl>;
//     at::Tensor run(const at::Tensor& x);
//   };
template <class M>
class Checkpointable : public CheckpointSwitch {
 protected:
  // Calls the method on this module: inside checkpoint() if the switch is on.
  template <class Result, class... Params, class... Inputs>
  Result checkpointed(Result (M::*method)(Params...), Inputs&&... inputs) {
    M* self = static_cast<M*>(this);
    if (!activation_checkpointing()) {
      return (self->*method)(std::forward<Inputs>(inputs)...);
    }
    // Backward may outlive the caller's handle of the module.
    auto keep = self->shared_from_this();
    return checkpoint(
        [self, keep, method](auto&&... a) {
          return (self->*method)(std::forward<decltype(a)>(a)...);
        },
        std::forward<Inputs>(inputs)...);
  }
};

// Turns checkpointing on for every module below `root` (itself included) that
// `predicate` (name, module) matches. Returns how many there were.
//
// Errors: kInvalidArgument naming the first match that is not Checkpointable,
// or if nothing matches; then nothing was turned on.
absl::StatusOr<int> apply_activation_checkpointing(
    torch::nn::Module& root,
    const std::function<bool(const std::string& name,
                             torch::nn::Module& module)>& predicate);

}  // namespace fullshard

#endif  // FULLSHARD_ACTIVATION_CKPT_CHECKPOINTABLE_H_
