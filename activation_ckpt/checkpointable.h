#ifndef FULLSHARD_ACTIVATION_CKPT_CHECKPOINTABLE_H_
#define FULLSHARD_ACTIVATION_CKPT_CHECKPOINTABLE_H_

#include <functional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "fullshard/activation_ckpt/checkpoint.h"
#include "fullshard/activation_ckpt/kept_operators.h"

namespace torch::nn {
class Module;
}

namespace fullshard {

// The switch that apply_activation_checkpointing() turns.
class CheckpointSwitch {
 public:
  void set_activation_checkpointing(bool on, CheckpointOptions options = {}) {
    on_ = on;
    options_ = std::move(options);
  }
  bool activation_checkpointing() const { return on_; }
  const CheckpointOptions& checkpoint_options() const { return options_; }

 protected:
  ~CheckpointSwitch() = default;

 private:
  bool on_ = false;
  CheckpointOptions options_;
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
    return checkpoint_with(
        checkpoint_options(),
        [self, keep, method](auto&&... a) {
          return (self->*method)(std::forward<decltype(a)>(a)...);
        },
        std::forward<Inputs>(inputs)...);
  }
};

using ModulePredicate =
    std::function<bool(const std::string& name, torch::nn::Module& module)>;

// Turns checkpointing on for every module below `root` (itself included) that
// `predicate` matches, called in module order. Messages name the module by its
// path. Returns how many there were.
//
// Errors: kInvalidArgument naming the first match that is not Checkpointable,
// or if nothing matches; then nothing was turned on.
absl::StatusOr<int> apply_activation_checkpointing(
    torch::nn::Module& root, const ModulePredicate& predicate,
    const CheckpointOptions& options = {});

// Of the modules that `predicate` matches, the first and then every k-th:
// checkpoints part of the blocks, for less time and more memory. For one
// traversal. Requires: k is at least 1.
ModulePredicate every_kth(int k, ModulePredicate predicate);

}  // namespace fullshard

#endif  // FULLSHARD_ACTIVATION_CKPT_CHECKPOINTABLE_H_
