#ifndef FULLSHARD_IO_PT_READER_H_
#define FULLSHARD_IO_PT_READER_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/pt_value.h"
#include "fullshard/io/zip_reader.h"

namespace fullshard {

// Reads what torch.save wrote: the zip format, and the legacy format of before
// PyTorch 1.6, by Python 2 too. Runs nothing that the file names. Opening reads
// the directory and the pickle only; tensors are views of the mapped file and
// are read when touched (a storage that the legacy format did not align is
// copied then).
class PtReader {
 public:
  // Errors, all with the path: NotFound; InvalidArgument for what is no
  // checkpoint (a folder, an empty file, a Git-LFS pointer, a web page, a
  // safetensors file, ...); Unimplemented for TorchScript archives; DataLoss
  // where it is cut short or damaged; PermissionDenied for a pickle that names
  // a function or type which is not allowed.
  static absl::StatusOr<std::unique_ptr<PtReader>> open(
      const std::string& path);

  const std::string& path() const { return path_; }
  const PtValue& root() const { return *root_; }
  bool is_legacy() const { return !zip_.has_value(); }

  // Returns the tensor as a view of the file, without reading it. Tensors that
  // shared a storage share it again. Writing to it changes memory, never the
  // file.
  // Requires: value.is_tensor(), and `value` is of this reader.
  // Lifetime: the tensor keeps the mapping alive, not the reader.
  // requires_grad is not set.
  // Errors: DataLoss if its bytes are missing.
  absl::StatusOr<at::Tensor> tensor(const PtValue& value);

  // Reads the whole file and compares every checksum; the legacy format has
  // none.
  absl::Status verify() const;

 private:
  PtReader(std::string path, std::shared_ptr<MappedFile> file);
  absl::Status read_archive();
  absl::Status read_legacy();
  absl::StatusOr<absl::string_view> storage_bytes(const std::string& key) const;
  absl::StatusOr<c10::Storage> storage(const PickledTensor& tensor);

  const std::string path_;
  const std::shared_ptr<MappedFile> file_;
  std::optional<PtValue> root_;
  // Of the zip format.
  std::optional<ZipReader> zip_;
  std::string prefix_;  // "archive/"
  // Of the legacy format: where each storage lies in the file.
  std::unordered_map<std::string, absl::string_view> legacy_storages_;
  // Those in use, so that tied tensors share one.
  std::unordered_map<std::string, c10::weak_intrusive_ptr<c10::StorageImpl>>
      storages_;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_PT_READER_H_
