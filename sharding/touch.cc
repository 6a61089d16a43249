// The dispatcher fallback of the touch key: every operator that receives a
// sharded parameter enters here, has its units unsharded, and runs again. Where
// units differ in dtype its other inputs are cast to the parameter's.

#include <algorithm>
#include <utility>
#include <vector>

#include "ATen/autocast_mode.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "absl/strings/match.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "fullshard/core/storage_owner.h"
#include "fullshard/sharding/sharded_state.h"
#include "torch/library.h"

namespace fullshard::internal {
namespace {

bool casts_inputs(const FlatParameter& flat) {
  const FlatParameter::Placement& placement = flat.placement();
  return placement.cast_inputs && at::isFloatingType(placement.compute_dtype);
}

// The paged tensors among an operator's arguments, and their units.
struct PagedArguments {
  std::vector<at::Tensor> tensors;
  std::vector<Unit*> units;
  const FlatParameter* casting = nullptr;  // One that wants inputs cast.

  void add(const at::Tensor& tensor) {
    StorageOwner* owner = storage_owner(tensor);
    if (owner == nullptr) return;
    tensors.push_back(tensor);
    auto* flat = static_cast<FlatParameter*>(owner);
    if (flat->unit == nullptr) flat->touch();  // Says that it is gone.
    if (casts_inputs(*flat)) casting = flat;
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

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  const bool is_input = tensor.defined() &&
                        at::isFloatingType(tensor.scalar_type()) &&
                        storage_owner(tensor) == nullptr &&
                        !tensor.unsafeGetTensorImpl()->is_wrapped_number();
  return is_input ? tensor.to(dtype) : tensor;
}

// What the operator writes to, and running statistics, stay as they are.
void cast_inputs(const c10::OperatorHandle& op, const FlatParameter& casting,
                 torch::jit::Stack& stack) {
  const FlatParameter::Placement& placement = casting.placement();
  if (at::autocast::is_autocast_enabled(placement.device.type())) return;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    if ((alias != nullptr && alias->isWrite()) ||
        absl::StartsWith(arguments[i].name(), "running_")) {
      continue;
    }
    c10::IValue& value = torch::jit::peek(stack, i, arguments.size());
    if (value.isTensor()) {
      value = cast(value.toTensor(), placement.compute_dtype);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorList()) {
        tensors.push_back(cast(tensor, placement.compute_dtype));
      }
      value = std::move(tensors);
    }
  }
}

// Views of parameters have their inputs cast too.
void watch_views(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  for (const c10::IValue& value :
       torch::jit::last(stack, op.schema().returns().size())) {
    const auto watch = [](const at::Tensor& tensor) {
      if (tensor.defined() && storage_owner(tensor) != nullptr) {
        set_touch_key(tensor, true);
      }
    };
    if (value.isTensor()) watch(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorList()) watch(tensor);
  }
}

void touch_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet,
                    torch::jit::Stack* stack) {
  const PagedArguments paged = paged_arguments(op, *stack);
  touch_all(paged.units);
  // p.data() of a sharded parameter is another tensor with the same key.
  for (const at::Tensor& tensor : paged.tensors) {
    if (!has_touch_key(tensor)) continue;
    StorageOwner* const owner = storage_owner(tensor);
    point_at(tensor, owner->slot_storage(),
             casts_inputs(*static_cast<FlatParameter*>(owner)));
  }
  if (paged.casting == nullptr) {
    op.callBoxed(stack);
    return;
  }
  cast_inputs(op, *paged.casting, *stack);
  {
    // The key stays on: what the operator calls must not enter here again.
    c10::impl::ExcludeDispatchKeyGuard no_touch(kTouchKey);
    op.callBoxed(stack);
  }
  watch_views(op, *stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&touch_fallback>());
}

}  // namespace fullshard::internal
