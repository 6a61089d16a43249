#include "fullshard/activation_ckpt/kept_outputs.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "torch/library.h"

namespace fullshard {
namespace internal {
namespace {

// Below autograd; made for an extension that exists in Python only.
constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;

thread_local KeptOutputs::Scope* t_scope = nullptr;

void kept_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  // What the operator calls is its own affair.
  c10::impl::ExcludeDispatchKeyGuard no_key(kKey);
  const bool wanted = KeptOutputs::wanted(op);
  if (wanted && KeptOutputs::answer(op, *stack)) return;
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  if (wanted) KeptOutputs::store(op, *stack);
}

// Shares memory and version counter, but has no graph: that would hold the
// frame that holds this.
c10::IValue without_graph(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return value;
  return value.toTensor().tensor_data();
}

TORCH_LIBRARY_IMPL(_, Fake, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

void mutating_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (value.isTensor()) {
      KeptOutputs::before_write(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        KeptOutputs::before_write(tensor);
      }
    }
  }
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

bool writes(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::Argument& argument) {
                       return argument.alias_info() != nullptr &&
                              argument.alias_info()->isWrite();
                     });
}

// Kernels are registered once per process and operator, and never taken back.
class Kernels {
 public:
  static Kernels& instance() {
    static auto* const kernels = new Kernels;
    return *kernels;
  }

  void add(const c10::OperatorName& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.empty()) watch_writes();
    if (kept_.insert(c10::toString(name)).second) {
      add(name, torch::CppFunction::makeFromBoxedFunction<&kept_operator>());
    }
  }

 private:
  void watch_writes() {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto handle = dispatcher.findSchema(name);
      if (!handle.has_value() || !writes(handle->schema())) continue;
      add(name,
          torch::CppFunction::makeFromBoxedFunction<&mutating_operator>());
    }
  }

  void add(const c10::OperatorName& name, torch::CppFunction&& kernel) {
    const size_t colons = name.name.find("::");
    const std::string space = name.name.substr(0, colons);
    auto& library = libraries_[space];
    if (!library) {
      library = std::make_unique<torch::Library>(
          torch::Library::IMPL, space, kKey, __FILE__,
          static_cast<uint32_t>(__LINE__));
    }
    std::string op = name.name.substr(colons + 2);
    if (!name.overload_name.empty()) {
      absl::StrAppend(&op, ".", name.overload_name);
    }
    library->impl(op.c_str(), std::move(kernel));
  }

  std::mutex mutex_;
  std::set<std::string> kept_;
  std::map<std::string, std::unique_ptr<torch::Library>> libraries_;
};

}  // namespace

KeptOutputs::Scope::Scope(KeptOutputs* outputs, bool replay,
                          const std::string* frame_name)
    : outputs_(outputs),
      replay_(replay),
      frame_name_(frame_name),
      before_(std::exchange(t_scope, this)) {
  if (outputs != nullptr) key_.emplace(kKey);
}

KeptOutputs::Scope::~Scope() { t_scope = before_; }

bool KeptOutputs::wanted(const c10::OperatorHandle& op) {
  return t_scope != nullptr && t_scope->outputs_ != nullptr &&
         t_scope->outputs_->operators_->contains(op);
}

bool KeptOutputs::answer(const c10::OperatorHandle& op,
                         torch::jit::Stack& stack) {
  Scope& scope = *t_scope;
  if (!scope.replay_) return false;
  const std::vector<Call>& calls = scope.outputs_->calls_;
  const std::string& frame = *scope.frame_name_;
  TORCH_CHECK(scope.next_ < calls.size(), "checkpoint()", frame,
              ": the recomputed function calls ", op.operator_name(),
              " more often than the first run did; it must do the same both "
              "times");
  const Call& call = calls[scope.next_++];
  TORCH_CHECK(call.schema == &op.schema(), "checkpoint()", frame,
              ": the recomputed function calls ", op.operator_name(),
              " where the first run called ", call.schema->operator_name(),
              "; it must do the same both times");
  torch::jit::drop(stack, op.schema().arguments().size());
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    const c10::IValue& kept = call.outputs[i];
    if (kept.isTensor() && kept.toTensor().defined()) {
      TORCH_CHECK(
          static_cast<uint32_t>(kept.toTensor()._version()) == call.versions[i],
          "checkpoint()", frame, ": the kept output of ", op.operator_name(),
          ", of shape ", kept.toTensor().sizes(),
          ", was modified in place after the function had returned; do not "
          "keep this operator, or do not modify it");
    }
    stack.push_back(without_graph(kept));
  }
  return true;
}

void KeptOutputs::unshare(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  for (Call& call : calls_) {
    for (size_t i = 0; i < call.outputs.size(); ++i) {
      c10::IValue& kept = call.outputs[i];
      if (!kept.isTensor() || !kept.toTensor().defined() ||
          !kept.toTensor().is_alias_of(tensor)) {
        continue;
      }
      c10::impl::ExcludeDispatchKeyGuard no_key(kKey);
      at::NoGradGuard no_grad;
      kept = kept.toTensor().clone();
      call.versions[i] = 0;
    }
  }
}

void KeptOutputs::before_write(const at::Tensor& tensor) {
  for (Scope* scope = t_scope; scope != nullptr; scope = scope->before_) {
    if (scope->outputs_ != nullptr) scope->outputs_->unshare(tensor);
  }
}

void KeptOutputs::store(const c10::OperatorHandle& op,
                        const torch::jit::Stack& stack) {
  if (t_scope->replay_) return;
  Call call{&op.schema(), {}, {}};
  const size_t num_outputs = op.schema().returns().size();
  for (const c10::IValue& value : torch::jit::last(stack, num_outputs)) {
    const bool tensor = value.isTensor() && value.toTensor().defined();
    call.versions.push_back(
        tensor ? static_cast<uint32_t>(value.toTensor()._version()) : 0);
    call.outputs.push_back(without_graph(value));
  }
  t_scope->outputs_->calls_.push_back(std::move(call));
}

}  // namespace internal

absl::StatusOr<std::shared_ptr<const KeptOperators>> KeptOperators::create(
    const std::vector<std::string>& names) {
  std::shared_ptr<KeptOperators> kept(new KeptOperators);
  std::vector<c10::OperatorHandle> handles;
  for (const std::string& text : names) {
    const size_t dot = text.find('.');
    const c10::OperatorName name(
        text.substr(0, dot),
        dot == std::string::npos ? "" : text.substr(dot + 1));
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle.has_value()) {
      return absl::NotFoundError(
          absl::StrCat("selective checkpointing: there is no operator '", text,
                       "'; expected a name as aten::mm or aten::add.Tensor"));
    }
    for (const auto* list :
         {&handle->schema().arguments(), &handle->schema().returns()}) {
      for (const c10::Argument& argument : *list) {
        if (argument.alias_info() == nullptr) continue;
        return absl::InvalidArgumentError(absl::StrCat(
            "selective checkpointing: the outputs of '", text,
            "' cannot be kept: it writes to its arguments or returns views "
            "of them"));
      }
    }
    // Lists of tensors are not looked into.
    for (const c10::Argument& output : handle->schema().returns()) {
      if (output.type()->kind() != c10::TypeKind::ListType) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("selective checkpointing: the outputs of '", text,
                       "' cannot be kept: it returns a list"));
    }
    if (handle->hasTag(at::Tag::nondeterministic_seeded)) continue;
    handles.push_back(*handle);
  }
  for (const c10::OperatorHandle& handle : handles) {
    internal::Kernels::instance().add(handle.operator_name());
    kept->schemas_.push_back(&handle.schema());
  }
  return kept;
}

bool KeptOperators::contains(const c10::OperatorHandle& op) const {
  return std::find(schemas_.begin(), schemas_.end(), &op.schema()) !=
         schemas_.end();
}

std::shared_ptr<const KeptOperators> matmuls_and_attention() {
  static const auto* const kept = new std::shared_ptr<const KeptOperators>(
      KeptOperators::create(
          {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
           "aten::convolution",
           "aten::_scaled_dot_product_flash_attention_for_cpu",
           "aten::_scaled_dot_product_flash_attention",
           "aten::_scaled_dot_product_efficient_attention",
           "aten::_scaled_dot_product_cudnn_attention"})
          .value());
  return *kept;
}

}  // namespace fullshard
