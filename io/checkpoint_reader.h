#ifndef FULLSHARD_IO_CHECKPOINT_READER_H_
#define FULLSHARD_IO_CHECKPOINT_READER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fullshard {

struct CheckpointTensor {
  // "model.projector.0.weight". A .pt file nests dicts and lists; their keys
  // are joined by dots.
  std::string name;
  std::vector<std::string> path;               // the keys themselves
  std::string dtype;                           // "bfloat16", or "f6_e2m3"
  std::optional<c10::ScalarType> scalar_type;  // LibTorch's, if it has one
  std::vector<int64_t> sizes;
  int64_t num_bytes = 0;  // of the elements
  // The earlier tensor that is the same view of the same storage.
  std::optional<size_t> tied_to;
};

// The tensors of a checkpoint by name, whatever its format. Opening reads what
// describes them; nothing that a file names is run.
class CheckpointReader {
 public:
  virtual ~CheckpointReader() = default;

  const std::string& path() const { return path_; }
  // "pt", "legacy pt", "safetensors"; of several files "sharded ..." .
  const std::string& format() const { return format_; }
  // In the order of the file.
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }
  // What is no tensor, by name: metadata of a safetensors file; numbers,
  // strings and the like of a .pt file, as Python prints them.
  const std::vector<std::pair<std::string, std::string>>& metadata() const {
    return metadata_;
  }

  // Returns tensor i as a view of the mapped file, read when touched. Writing
  // to it changes memory, never the file.
  // Lifetime: the tensor keeps the mapping alive, not the reader.
  // Errors: DataLoss if its bytes are missing; Unimplemented where LibTorch
  // lacks the dtype.
  virtual absl::StatusOr<at::Tensor> tensor(size_t i) = 0;

  // The row-major bytes of a tensor whose dtype LibTorch lacks.
  // Errors: Unimplemented for any other.
  virtual absl::StatusOr<absl::string_view> bytes(size_t i);

 protected:
  CheckpointReader(std::string path, std::string format)
      : path_(std::move(path)), format_(std::move(format)) {}

  std::string path_;
  std::string format_;
  std::vector<CheckpointTensor> tensors_;
  std::vector<std::pair<std::string, std::string>> metadata_;
};

// Opens a .pt file (zip or legacy), a safetensors file, an index of either, or
// a folder: a sharded checkpoint, Python's DCP, Hugging Face's
// (model.safetensors, pytorch_model.bin, with or without index), or a run's or
// its checkpoints', with `latest-checkpoint.pt` or `latest`. Errors: those of
// PtReader and SafetensorsReader; NotFound for a folder that holds none of
// these.
absl::StatusOr<std::unique_ptr<CheckpointReader>> open_checkpoint(
    const std::string& path);

}  // namespace fullshard

#endif  // FULLSHARD_IO_CHECKPOINT_READER_H_
