#ifndef FULLSHARD_IO_MAPPED_STORAGE_H_
#define FULLSHARD_IO_MAPPED_STORAGE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <memory>
#include <vector>

#include "absl/strings/string_view.h"
#include "fullshard/io/mapped_file.h"

namespace fullshard {

// Returns a storage over `bytes`, which lie in `file`. It keeps the mapping
// alive. Bytes that do not start at a multiple of `alignment` are copied, for
// only this makes their elements addressable.
c10::Storage mapped_storage(const std::shared_ptr<MappedFile>& file,
                            absl::string_view bytes, size_t alignment);

// The file that the storage of `tensor` maps; null: it maps none.
std::shared_ptr<MappedFile> mapped_file_of(const at::Tensor& tensor);

// Lets the system forget the pages that lie wholly in the storage of `tensor`,
// if that is a mapped one; they are read from the file when touched again. So
// a file larger than memory passes through in a bounded number of pages.
// Requires: nothing was written to the tensor.
void release_pages(const at::Tensor& tensor);

// Returns a strided view of `storage`; sizes, strides and offset in elements.
// Requires: the view lies in the storage.
at::Tensor tensor_view(c10::Storage storage, c10::ScalarType dtype,
                       const std::vector<int64_t>& sizes,
                       const std::vector<int64_t>& strides, int64_t offset);

// The strides of contiguous elements.
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes);

}  // namespace fullshard

#endif  // FULLSHARD_IO_MAPPED_STORAGE_H_
