#include "fullshard/core/saved_tensor_hooks.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "torch/csrc/autograd/engine.h"

namespace fullshard::internal {
namespace {

namespace ag = torch::autograd;

thread_local HookFactory* t_factory = nullptr;
thread_local std::weak_ptr<void> t_recompute_token;

struct Observers {
  std::mutex mutex;
  std::vector<BackwardObserver*> list;

  std::vector<BackwardObserver*> snapshot() {
    std::lock_guard<std::mutex> lock(mutex);
    return list;
  }
};

Observers& observers() {
  static Observers* const observers = new Observers;
  return *observers;
}

class SaveHook final : public SavedTensorHook {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    saved_.pack(tensor);
  }
  at::Tensor call_unpack_hook() override { return saved_.unpack(); }

 private:
  SavedTensor saved_;
};

class ShardingEngine final : public ag::Engine {
 public:
  std::unique_ptr<ag::SavedVariableHooks> get_default_saved_variable_hooks()
      override {
    if (t_factory != nullptr) return t_factory->make_hook();
    return std::make_unique<SaveHook>();
  }

  ag::variable_list execute(const ag::edge_list& roots,
                            const ag::variable_list& inputs, bool keep_graph,
                            bool create_graph, bool accumulate_grad,
                            const ag::edge_list& outputs) override {
    const bool outermost = ag::get_current_graph_task_id() < 0;
    const std::vector<BackwardObserver*> list = observers().snapshot();
    for (BackwardObserver* observer : list) {
      observer->before_backward(outputs, create_graph, accumulate_grad);
    }
    // Backward runs nodes outside every frame of the forward's thread.
    HookFactoryGuard no_factory(nullptr);
    ag::variable_list results;
    try {
      results = Engine::execute(roots, inputs, keep_graph, create_graph,
                                accumulate_grad, outputs);
    } catch (...) {
      if (outermost) {
        for (BackwardObserver* observer : list) observer->after_backward(false);
      }
      throw;
    }
    if (outermost) {
      for (BackwardObserver* observer : list) observer->after_backward(true);
    }
    return results;
  }
};

ShardingEngine* g_engine = nullptr;

ag::Engine& engine_stub() { return *g_engine; }

}  // namespace

void SavedTensor::pack(const at::Tensor& tensor) {
  // Not detach(): no dispatch, no grad_fn (so no cycle), and the version
  // counter is shared.
  tensor_ = tensor.tensor_data();
  version_ = static_cast<uint32_t>(tensor._version());
  StorageOwner* owner = storage_owner(tensor);
  if (owner == nullptr) return;
  owner_ = c10::intrusive_ptr<StorageOwner>::reclaim_copy(owner);
  generation_ = owner->generation();
  point_at(tensor_, owner->sharded_storage(), /*touch_key=*/false);
}

at::Tensor SavedTensor::unpack() const {
  TORCH_CHECK(static_cast<uint32_t>(tensor_._version()) == version_,
              "a tensor needed for backward, of shape ", tensor_.sizes(),
              ", was modified in place: it is at version ", tensor_._version(),
              ", backward expects version ", version_);
  if (!owner_) return tensor_;
  TORCH_CHECK(owner_->generation() == generation_, "the parameters of unit '",
              owner_->name(),
              "' changed between forward and backward (an optimizer step or a "
              "load); run the forward again");
  owner_->touch();
  at::Tensor view = tensor_.tensor_data();
  point_at(view, owner_->slot_storage(), /*touch_key=*/false);
  return view;
}

bool inside_hook_factory() { return t_factory != nullptr; }

HookFactoryGuard::HookFactoryGuard(HookFactory* factory)
    : before_(std::exchange(t_factory, factory)) {}

HookFactoryGuard::~HookFactoryGuard() { t_factory = before_; }

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    g_engine = new ShardingEngine;
    ag::set_default_engine_stub(&engine_stub);
  });
}

std::shared_ptr<void> observe_backward(BackwardObserver* observer) {
  install_engine();
  std::lock_guard<std::mutex> lock(observers().mutex);
  observers().list.push_back(observer);
  return std::shared_ptr<void>(nullptr, [observer](void*) {
    std::lock_guard<std::mutex> lock(observers().mutex);
    auto& list = observers().list;
    list.erase(std::remove(list.begin(), list.end(), observer), list.end());
  });
}

const std::weak_ptr<void>& recompute_token() { return t_recompute_token; }

RecomputeTokenGuard::RecomputeTokenGuard(std::weak_ptr<void> token)
    : before_(std::exchange(t_recompute_token, std::move(token))) {}

RecomputeTokenGuard::~RecomputeTokenGuard() {
  t_recompute_token = std::move(before_);
}

}  // namespace fullshard::internal
