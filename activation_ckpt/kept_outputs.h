#ifndef FULLSHARD_ACTIVATION_CKPT_KEPT_OUTPUTS_H_
#define FULLSHARD_ACTIVATION_CKPT_KEPT_OUTPUTS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/ivalue.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "fullshard/activation_ckpt/kept_operators.h"

namespace fullshard::internal {

// [Note: Kept outputs]
// What the kept operators of one frame returned, in the order of their calls.
// They are seen below autograd, through a dispatch key that nothing else uses
// and that is switched on while the frame's function runs: the first run stores
// outputs, later runs get them back, and autograd records both alike.
// An operator that writes to a kept output is seen too, and what is kept moves
// to a copy first.
class KeptOutputs {
 public:
  explicit KeptOutputs(std::shared_ptr<const KeptOperators> operators)
      : operators_(std::move(operators)) {}

  // While alive, kept operators of this thread store to `outputs` or, with
  // `replay`, are answered from it, from the first on. Null: they run as usual.
  class Scope {
   public:
    Scope(KeptOutputs* outputs, bool replay, const std::string* frame_name);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class KeptOutputs;
    KeptOutputs* const outputs_;
    const bool replay_;
    const std::string* const frame_name_;
    size_t next_ = 0;
    Scope* const before_;
    std::optional<c10::impl::IncludeDispatchKeyGuard> key_;
  };

  // Calls after the last save are never repeated: forgets them.
  void note_save() { calls_at_last_save_ = calls_.size(); }
  void first_run_ended() { calls_.resize(calls_at_last_save_); }
  // What is kept no longer shares memory with `tensor`.
  void unshare(const at::Tensor& tensor);

  // The kernel of kept operators. Returns whether it has put the outputs on
  // the stack; else the operator is to run.
  static bool answer(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  // To be called when it has run.
  static void store(const c10::OperatorHandle& op,
                    const torch::jit::Stack& stack);
  static bool wanted(const c10::OperatorHandle& op);
  // `tensor` is about to be written to.
  static void before_write(const at::Tensor& tensor);

 private:
  struct Call {
    const c10::FunctionSchema* schema;
    std::vector<c10::IValue> outputs;
    std::vector<uint32_t> versions;  // Of the tensors among them.
  };

  const std::shared_ptr<const KeptOperators> operators_;
  std::vector<Call> calls_;
  size_t calls_at_last_save_ = 0;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_ACTIVATION_CKPT_KEPT_OUTPUTS_H_
