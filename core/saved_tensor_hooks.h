#ifndef FULLSHARD_CORE_SAVED_TENSOR_HOOKS_H_
#define FULLSHARD_CORE_SAVED_TENSOR_HOOKS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/util/intrusive_ptr.h"
#include "fullshard/core/storage_owner.h"
#include "torch/csrc/autograd/edge.h"
#include "torch/csrc/autograd/saved_variable_hooks.h"

namespace fullshard::internal {

// How autograd keeps a tensor for backward: its data without its graph. A
// tensor of a paged storage is kept by its owner only, so that saving it does
// not keep its memory; unpacking touches the owner.
class SavedTensor {
 public:
  void pack(const at::Tensor& tensor);

  // Errors: c10::Error if the tensor was modified in place since pack(), or if
  // the unit's values changed (an optimizer step between forward and
  // backward). Hooks switch LibTorch's own check off, so it is made here.
  at::Tensor unpack() const;

 private:
  at::Tensor tensor_;
  c10::intrusive_ptr<StorageOwner> owner_;  // Null for an ordinary tensor.
  uint64_t generation_ = 0;
  uint32_t version_ = 0;
};

// A saved-variable hook without Python.
struct SavedTensorHook : torch::autograd::SavedVariableHooks {
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>>
  retrieve_unpack_hook_data() const override {
    return std::nullopt;
  }
};

// Makes the hooks for what autograd saves on this thread.
class HookFactory {
 public:
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hook() = 0;

 protected:
  ~HookFactory() = default;
};

// Whether a factory other than the default makes this thread's hooks.
bool inside_hook_factory();

// While alive, `factory` (null: SavedTensor) makes this thread's hooks.
class HookFactoryGuard {
 public:
  explicit HookFactoryGuard(HookFactory* factory);
  ~HookFactoryGuard();
  HookFactoryGuard(const HookFactoryGuard&) = delete;
  HookFactoryGuard& operator=(const HookFactoryGuard&) = delete;

 private:
  HookFactory* const before_;
};

// Sees every backward of the process, also those that fail or meet no node of
// ours; a final callback of LibTorch's engine would not.
class BackwardObserver {
 public:
  // Called before any work. May throw c10::Error to refuse the call.
  virtual void before_backward(const std::vector<torch::autograd::Edge>& outputs,
                               bool create_graph, bool accumulate_grad) = 0;

  // Called after the outermost backward. Must not throw if `ok` is false.
  virtual void after_backward(bool ok) = 0;

 protected:
  ~BackwardObserver() = default;
};

// Registers `observer` for the life of the returned token. Also installs the
// engine.
std::shared_ptr<void> observe_backward(BackwardObserver* observer);

// Installs our autograd engine, once per process, before the first graph that
// sharding or checkpointing takes part in. It is never destroyed: its threads
// live until the process ends.
void install_engine();

// [Note: Units kept for a recompute]
// A recompute publishes a token here, on its thread. Whoever pages memory in
// meanwhile keeps it until the token expires: the recording is used up, and so
// the backward of what was recomputed is over. Frames and sharding need not
// know each other.
const std::weak_ptr<void>& recompute_token();

class RecomputeTokenGuard {
 public:
  explicit RecomputeTokenGuard(std::weak_ptr<void> token);
  ~RecomputeTokenGuard();
  RecomputeTokenGuard(const RecomputeTokenGuard&) = delete;
  RecomputeTokenGuard& operator=(const RecomputeTokenGuard&) = delete;

 private:
  std::weak_ptr<void> before_;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_CORE_SAVED_TENSOR_HOOKS_H_
