#ifndef FULLSHARD_IO_PT_READER_H_
#define FULLSHARD_IO_PT_READER_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/pt_value.h"
#include "fullshard/io/zip_reader.h"

namespace fullshard {

// Reads what torch.save wrote (zip format, since PyTorch 1.6). Runs nothing
// that the file names. Opening reads the directory and the pickle only; tensors
// are views of the mapped file and are read when touched.
class PtReader {
 public:
  // Errors, all with the path: NotFound; InvalidArgument for what is no
  // checkpoint (a folder, an empty file, a Git-LFS pointer, a web page, a
  // safetensors file, ...); Unimplemented for the legacy format and TorchScript
  // archives; DataLoss where it is cut short or damaged; PermissionDenied for
  // a pickle that names a function or type which is not allowed.
  static absl::StatusOr<std::unique_ptr<PtReader>> open(
      const std::string& path);

  const std::string& path() const { return path_; }
  const PtValue& root() const { return root_; }

  // Returns the tensor as a view of the file, without reading it. Tensors that
  // shared a storage share it again. Writing to it changes memory, never the
  // file.
  // Requires: value.is_tensor(), and `value` is of this reader.
  // Lifetime: the tensor keeps the mapping alive, not the reader.
  // requires_grad is not set.
  // Errors: DataLoss if its bytes are missing.
  absl::StatusOr<at::Tensor> tensor(const PtValue& value);

  // Reads the whole file and compares every checksum.
  absl::Status verify() const;

 private:
  PtReader(std::string path, std::shared_ptr<MappedFile> file, ZipReader zip,
           std::string prefix, PtValue root);
  absl::StatusOr<c10::Storage> storage(const PickledTensor& tensor);

  const std::string path_;
  const std::shared_ptr<MappedFile> file_;
  const ZipReader zip_;
  const std::string prefix_;  // "archive/"
  const PtValue root_;
  std::unordered_map<std::string, c10::Storage> storages_;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_PT_READER_H_
