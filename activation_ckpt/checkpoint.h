#ifndef FULLSHARD_ACTIVATION_CKPT_CHECKPOINT_H_
#define FULLSHARD_ACTIVATION_CKPT_CHECKPOINT_H_

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "c10/core/GradMode.h"
#include "fullshard/activation_ckpt/checkpoint_options.h"
#include "fullshard/activation_ckpt/frame.h"
#include "fullshard/core/tensor_tree.h"

namespace fullshard {

// Calls fn(inputs...) and returns its result, without keeping what autograd
// saves inside: backward calls `fn` again and computes it anew. No-reentrant:
// recomputation stops as soon as all that was saved is there again, and fn may
// be nested, return anything, and reach parameters on its own.
//
// Tensors inside `inputs` (see core/tensor_tree.h) are kept, and are how
// gradients reach what was computed before; tensors that `fn` captures need no
// gradient from here but are kept alive by it.
//
// Requires: fn computes the same each time it is called on equal inputs and
// random state. Buffers that it updates (BatchNorm) are updated twice.
// Errors: c10::Error in backward if the second run saves other tensors than the
// first, naming the tensor.
//
// Example:
//   x = checkpoint([block](at::Tensor x) { return block->forward(x); }, x);
template <class Fn, class... Inputs>
auto checkpoint_with(const CheckpointOptions& options, Fn fn,
                     Inputs&&... inputs) {
  std::tuple<std::decay_t<Inputs>...> arguments(
      std::forward<Inputs>(inputs)...);
  if (!at::GradMode::is_enabled()) {
    return std::apply(fn, std::move(arguments));
  }
  std::vector<at::Tensor> tensors;
  auto kept = arguments;
  for_each_tensor(kept, [&](at::Tensor& tensor) {
    tensors.push_back(std::move(tensor));  // The frame saves them.
    tensor = at::Tensor();
  });
  auto shared_fn = std::make_shared<Fn>(std::move(fn));
  auto rerun = [shared_fn, kept](std::vector<at::Tensor> values) {
    auto again = kept;
    size_t i = 0;
    for_each_tensor(
        again, [&](at::Tensor& tensor) { tensor = std::move(values[i++]); });
    std::apply(*shared_fn, std::move(again));
  };
  const std::shared_ptr<internal::Frame> frame =
      internal::Frame::open(tensors, std::move(rerun), options);
  using Result = decltype(std::apply(*shared_fn, std::move(arguments)));
  const auto run = [&]() -> Result {
    const internal::Frame::FirstRun first_run(*frame);
    return std::apply(*shared_fn, std::move(arguments));
  };
  if constexpr (std::is_void_v<Result>) {
    run();
  } else {
    std::decay_t<Result> result = run();
    auto note = [&](at::Tensor& tensor) { frame->note_result(tensor); };
    internal::visit_tensors(result, note);
    return result;
  }
}

template <class Fn, class... Inputs>
auto checkpoint(Fn fn, Inputs&&... inputs) {
  return checkpoint_with(CheckpointOptions(), std::move(fn),
                         std::forward<Inputs>(inputs)...);
}

}  // namespace fullshard

#endif  // FULLSHARD_ACTIVATION_CKPT_CHECKPOINT_H_
