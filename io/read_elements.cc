#include "fullshard/io/read_elements.h"

#include <ATen/ops/empty.h>

#include <memory>

#include "c10/core/GradMode.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/mapped_storage.h"

namespace fullshard {

absl::Status read_elements(const at::Tensor& tensor,
                           const std::vector<int64_t>& order, int64_t begin,
                           at::Tensor out) {
  at::NoGradGuard no_grad;
  if (out.numel() == 0) return absl::OkStatus();
  const std::shared_ptr<MappedFile> file = mapped_file_of(tensor);
  const bool in_order = tensor.strides() == at::IntArrayRef(strides_of(
                                                tensor.sizes().vec(), order));
  if (file == nullptr || !in_order) {
    if (file != nullptr) FS_RETURN_IF_ERROR(file->check_whole());
    out.copy_(elements_in_order(tensor, order).narrow(0, begin, out.numel()));
    return absl::OkStatus();
  }
  const bool as_stored =
      out.is_cpu() && out.scalar_type() == tensor.scalar_type();
  const at::Tensor stored =
      as_stored ? out : at::empty(out.sizes(), tensor.scalar_type());
  const auto* const first = static_cast<const char*>(tensor.const_data_ptr()) +
                            begin * static_cast<int64_t>(tensor.element_size());
  FS_RETURN_IF_ERROR(file->read(static_cast<size_t>(first - file->data()),
                                stored.nbytes(), stored.mutable_data_ptr()));
  if (!as_stored) out.copy_(stored);
  return absl::OkStatus();
}

}  // namespace fullshard
