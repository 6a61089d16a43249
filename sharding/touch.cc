// The dispatcher fallback of the touch key: every operator that receives a
// sharded parameter enters here, has its units unsharded, and runs again.

#include <algorithm>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "fullshard/core/storage_owner.h"
#include "fullshard/sharding/sharded_state.h"
#include "torch/library.h"

namespace fullshard::internal {
namespace {

// The paged tensors among an operator's arguments, and their units.
struct PagedArguments {
  std::vector<at::Tensor> tensors;
  std::vector<Unit*> units;

  void add(const at::Tensor& tensor) {
    StorageOwner* owner = storage_owner(tensor);
    if (owner == nullptr) return;
    tensors.push_back(tensor);
    auto* flat = static_cast<FlatParameter*>(owner);
    if (flat->unit == nullptr) flat->touch();  // Says that it is gone.
    if (std::find(units.begin(), units.end(), flat->unit) == units.end()) {
      units.push_back(flat->unit);
    }
  }
};

PagedArguments paged_arguments(const c10::OperatorHandle& op,
                               const torch::jit::Stack& stack) {
  PagedArguments paged;
  for (const c10::IValue& value :
       torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) {
      paged.add(value.toTensor());
    } else if (value.isList()) {  // Tensor[] and Tensor?[]
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) paged.add(element.toTensor());
      }
    }
  }
  return paged;
}

// Units that are already unsharded belong to the set too: else touching the
// others would take them away again.
void touch_all(std::vector<Unit*> units) {
  while (!units.empty()) {
    ShardedState* const model = units.back()->model;
    const auto mine =
        std::stable_partition(units.begin(), units.end(),
                              [&](const Unit* u) { return u->model != model; });
    model->touch(
        c10::ArrayRef<Unit*>(&*mine, static_cast<size_t>(units.end() - mine)));
    units.erase(mine, units.end());
  }
}

void touch_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet,
                    torch::jit::Stack* stack) {
  const PagedArguments paged = paged_arguments(op, *stack);
  touch_all(paged.units);
  // p.data() of a sharded parameter is another tensor with the same key.
  for (const at::Tensor& tensor : paged.tensors) {
    if (has_touch_key(tensor)) {
      point_at(tensor, storage_owner(tensor)->slot_storage(),
               /*touch_key=*/false);
    }
  }
  op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&touch_fallback>());
}

}  // namespace fullshard::internal
