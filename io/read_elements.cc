#include "fullshard/io/read_elements.h"

#include <ATen/ops/empty.h>

#include <memory>

#include "c10/core/GradMode.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/mapped_storage.h"

namespace fullshard {

namespace {

// Where elements of a tensor are that maps a file.
struct Bytes {
  std::shared_ptr<MappedFile> file;  // Null: in memory, or not in that order.
  size_t offset = 0, size = 0;
};

Bytes bytes_in_file(const at::Tensor& tensor, const std::vector<int64_t>& order,
                    int64_t begin, int64_t numel) {
  Bytes bytes;
  const bool in_order = tensor.strides() == at::IntArrayRef(strides_of(
                                                tensor.sizes().vec(), order));
  if (in_order) bytes.file = mapped_file_of(tensor);
  if (bytes.file == nullptr) return bytes;
  const auto element = static_cast<int64_t>(tensor.element_size());
  const auto* const first =
      static_cast<const char*>(tensor.const_data_ptr()) + begin * element;
  bytes.offset = static_cast<size_t>(first - bytes.file->data());
  bytes.size = static_cast<size_t>(numel * element);
  return bytes;
}

}  // namespace

absl::Status read_elements(const at::Tensor& tensor,
                           const std::vector<int64_t>& order, int64_t begin,
                           at::Tensor out) {
  at::NoGradGuard no_grad;
  if (out.numel() == 0) return absl::OkStatus();
  const Bytes bytes = bytes_in_file(tensor, order, begin, out.numel());
  if (bytes.file == nullptr) {
    const std::shared_ptr<MappedFile> file = mapped_file_of(tensor);
    if (file != nullptr) FS_RETURN_IF_ERROR(file->check_whole());
    out.copy_(elements_in_order(tensor, order).narrow(0, begin, out.numel()));
    return absl::OkStatus();
  }
  const bool as_stored =
      out.is_cpu() && out.scalar_type() == tensor.scalar_type();
  const at::Tensor stored =
      as_stored ? out : at::empty(out.sizes(), tensor.scalar_type());
  FS_RETURN_IF_ERROR(
      bytes.file->read(bytes.offset, bytes.size, stored.mutable_data_ptr()));
  if (!as_stored) out.copy_(stored);
  return absl::OkStatus();
}

void read_elements_ahead(const at::Tensor& tensor,
                         const std::vector<int64_t>& order, int64_t begin,
                         int64_t numel) {
  const Bytes bytes = bytes_in_file(tensor, order, begin, numel);
  if (bytes.file != nullptr) bytes.file->read_ahead(bytes.offset, bytes.size);
}

}  // namespace fullshard
