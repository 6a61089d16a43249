#include "fullshard/io/mapped_storage.h"

#include <ATen/core/TensorBase.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fullshard {
namespace {

void release_mapping(void* context) {
  delete static_cast<std::shared_ptr<MappedFile>*>(context);
}

c10::DataPtr copy_aligned(absl::string_view bytes) {
  c10::DataPtr copy = c10::GetCPUAllocator()->allocate(bytes.size());
  if (!bytes.empty()) std::memcpy(copy.get(), bytes.data(), bytes.size());
  return copy;
}

}  // namespace

c10::Storage mapped_storage(const std::shared_ptr<MappedFile>& file,
                            absl::string_view bytes, size_t alignment) {
  char* const data = file->data() + (bytes.data() - file->data());
  const bool is_aligned = reinterpret_cast<uintptr_t>(data) % alignment == 0;
  c10::DataPtr pointer =
      is_aligned ? c10::DataPtr(data, new std::shared_ptr<MappedFile>(file),
                                &release_mapping, c10::Device(c10::kCPU))
                 : copy_aligned(bytes);
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes.size(),
                      std::move(pointer));
}

std::shared_ptr<MappedFile> mapped_file_of(const at::Tensor& tensor) {
  const c10::DataPtr& pointer = tensor.storage().data_ptr();
  if (pointer.get_deleter() != &release_mapping) return nullptr;
  return *static_cast<const std::shared_ptr<MappedFile>*>(
      pointer.get_context());
}

void release_pages(const at::Tensor& tensor) {
  const c10::DataPtr& pointer = tensor.storage().data_ptr();
  if (pointer.get_deleter() != &release_mapping) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(pointer.get());
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + tensor.storage().nbytes()) / page * page;
  if (first < last) {
    ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }
}

at::Tensor tensor_view(c10::Storage storage, c10::ScalarType dtype,
                       const std::vector<int64_t>& sizes,
                       const std::vector<int64_t>& strides, int64_t offset) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

}  // namespace fullshard
