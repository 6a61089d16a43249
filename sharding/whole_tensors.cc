#include "fullshard/sharding/whole_tensors.h"

#include <algorithm>

#include "ATen/ops/empty_like.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"

namespace fullshard::internal {

WholeTensors::WholeTensors(torch::nn::Module& root, const ProcessGroups& groups,
                           const ShardOptions& options) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  buffer_dtype_ = options.mixed_precision.buffer_dtype;
  visit(root, "", options);
  std::stable_partition(tensors_.begin(), tensors_.end(),
                        [](const Whole& whole) { return !whole.is_buffer; });
  for (Whole& buffer : tensors_) {
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

void WholeTensors::visit(torch::nn::Module& module, const std::string& prefix,
                         const ShardOptions& options) {
  const MixedPrecision& policy = options.mixed_precision;
  if (options.ignored) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const std::string name = prefix + item.key();
      if (!item.value().defined() || !options.ignored(name)) continue;
      Whole whole;
      whole.name = name;
      whole.is_buffer = false;
      whole.tensor = item.value();
      tensors_.push_back(std::move(whole));
    }
  }
  const bool keep =
      policy.keep_full_precision && policy.keep_full_precision(module);
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (!item.value().defined()) continue;
    Whole buffer;
    buffer.name = prefix + item.key();
    buffer.tensor = item.value();
    const at::ScalarType dtype = buffer.tensor.scalar_type();
    if (!keep && compute_dtype(dtype, policy.buffer_dtype) != dtype) {
      buffer.original = buffer.tensor;
    }
    tensors_.push_back(std::move(buffer));
  }
  for (const auto& child : module.named_children()) {
    visit(*child.value(), prefix + child.key() + ".", options);
  }
}

std::vector<std::string> WholeTensors::names() const {
  std::vector<std::string> names;
  for (const Whole& buffer : tensors_) names.push_back(buffer.name);
  return names;
}

std::vector<at::Tensor> WholeTensors::ignored_parameters() const {
  std::vector<at::Tensor> parameters;
  for (const Whole& whole : tensors_) {
    const auto same = [&](const at::Tensor& t) {
      return t.is_same(whole.tensor);
    };
    if (!whole.is_buffer &&
        std::none_of(parameters.begin(), parameters.end(), same)) {
      parameters.push_back(whole.tensor);
    }
  }
  return parameters;
}

at::Tensor WholeTensors::value(const std::string& name) const {
  for (const Whole& buffer : tensors_) {
    if (buffer.name != name) continue;
    if (!buffer.original.defined() || full_precision_) return buffer.tensor;
    return buffer.tensor._version() == buffer.version
               ? buffer.original
               : buffer.tensor.to(buffer.original.scalar_type());
  }
  return {};
}

void WholeTensors::set_full_precision(bool value) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  for (Whole& buffer : tensors_) {
    if (!buffer.original.defined() || value == full_precision_) continue;
    if (value) {
      buffer.tensor.set_data(this->value(buffer.name));
    } else {
      buffer.original = buffer.tensor.clone();
      buffer.tensor.set_data(buffer.tensor.to(*buffer_dtype_));
      buffer.version = buffer.tensor._version();
    }
  }
  full_precision_ = value;
}

absl::Status WholeTensors::load(const std::string& name,
                                const at::Tensor& values) {
  at::NoGradGuard no_grad;
  for (Whole& buffer : tensors_) {
    if (buffer.name != name) continue;
    if (values.sizes() != buffer.tensor.sizes()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", name, "': expected shape ", c10::str(buffer.tensor.sizes()),
          ", got ", c10::str(values.sizes())));
    }
    buffer.tensor.copy_(values);
    if (buffer.original.defined() && !full_precision_) {
      buffer.original.copy_(values);
      buffer.version = buffer.tensor._version();
    }
    return absl::OkStatus();
  }
  return absl::NotFoundError(
      absl::StrCat("no buffer or ignored parameter '", name, "'"));
}

}  // namespace fullshard::internal
