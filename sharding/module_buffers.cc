#include "fullshard/sharding/module_buffers.h"

#include "ATen/ops/empty_like.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"

namespace fullshard::internal {

ModuleBuffers::ModuleBuffers(torch::nn::Module& root,
                             const ProcessGroups& groups,
                             const ShardOptions& options) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  visit(root, "", options.mixed_precision);
  for (Buffer& buffer : buffers_) {
    at::Tensor& tensor = buffer.tensor;
    if (tensor.device() != groups.device()) {
      tensor.set_data(tensor.to(groups.device()));
    }
    if (options.sync_module_states && groups.world_size() > 1) {
      std::vector<at::Tensor> tensors = {tensor.contiguous()};
      groups.world()->broadcast(tensors)->wait();
      tensor.copy_(tensors[0]);
    }
    if (buffer.original.defined()) {  // Marked by visit().
      buffer.original = tensor.clone();
      tensor.set_data(tensor.to(*options.mixed_precision.buffer_dtype));
      buffer.version = tensor._version();
    }
  }
}

void ModuleBuffers::visit(torch::nn::Module& module, const std::string& prefix,
                          const MixedPrecision& policy) {
  const bool keep =
      policy.keep_full_precision && policy.keep_full_precision(module);
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (!item.value().defined()) continue;
    Buffer buffer;
    buffer.name = prefix + item.key();
    buffer.tensor = item.value();
    const at::ScalarType dtype = buffer.tensor.scalar_type();
    if (!keep && compute_dtype(dtype, policy.buffer_dtype) != dtype) {
      buffer.original = buffer.tensor;
    }
    buffers_.push_back(std::move(buffer));
  }
  for (const auto& child : module.named_children()) {
    visit(*child.value(), prefix + child.key() + ".", policy);
  }
}

std::vector<std::string> ModuleBuffers::names() const {
  std::vector<std::string> names;
  for (const Buffer& buffer : buffers_) names.push_back(buffer.name);
  return names;
}

at::Tensor ModuleBuffers::value(const std::string& name) const {
  for (const Buffer& buffer : buffers_) {
    if (buffer.name != name) continue;
    if (!buffer.original.defined()) return buffer.tensor;
    return buffer.tensor._version() == buffer.version
               ? buffer.original
               : buffer.tensor.to(buffer.original.scalar_type());
  }
  return {};
}

absl::Status ModuleBuffers::load(const std::string& name,
                                 const at::Tensor& values) {
  at::NoGradGuard no_grad;
  for (Buffer& buffer : buffers_) {
    if (buffer.name != name) continue;
    if (values.sizes() != buffer.tensor.sizes()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "buffer '", name, "': expected shape ",
          c10::str(buffer.tensor.sizes()), ", got ", c10::str(values.sizes())));
    }
    buffer.tensor.copy_(values);
    if (buffer.original.defined()) {
      buffer.original.copy_(values);
      buffer.version = buffer.tensor._version();
    }
    return absl::OkStatus();
  }
  return absl::NotFoundError(absl::StrCat("no buffer '", name, "'"));
}

}  // namespace fullshard::internal
