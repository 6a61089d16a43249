#ifndef FULLSHARD_IO_SAFETENSORS_WRITER_H_
#define FULLSHARD_IO_SAFETENSORS_WRITER_H_

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fullshard/io/atomic_file.h"
#include "fullshard/io/file_system.h"
#include "fullshard/io/safetensors_dtype.h"

namespace fullshard {

// A tensor that will be written, with its shape as the format counts it.
struct SafetensorsTensor {
  std::string name;
  const SafetensorsDtype* dtype;
  std::vector<int64_t> shape;
};

// Describes a tensor of LibTorch.
// Errors: InvalidArgument for a dtype that the format lacks.
absl::StatusOr<SafetensorsTensor> describe_safetensors(
    const std::string& name, c10::ScalarType dtype, std::vector<int64_t> sizes);

struct SafetensorsWriterOptions {
  std::map<std::string, std::string> metadata;
  FileSystem* file_system = nullptr;  // null: FileSystem::posix()
};

// Writes one safetensors file. The header comes first in the file, so all
// tensors are announced when it is created; their bytes come one tensor at a
// time, in any order, and are on their way to the disk when the call returns.
// In the file, tensors of larger elements go first, else as announced, so that
// every element is aligned. Tied tensors are written once each: the format has
// no sharing. The file appears in commit(), whole and durable; without it
// nothing appears.
//
// Errors: those of the file; InvalidArgument for a name that appears twice, is
// not UTF-8 or is reserved, a tensor that was not announced or comes again, or
// whose shape, dtype or size differ from what was announced. After an error
// only the destructor may be called.
class SafetensorsWriter {
 public:
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> create(
      const std::string& path, const std::vector<SafetensorsTensor>& tensors,
      const SafetensorsWriterOptions& options = {});

  // A tensor that is not contiguous or not on the CPU is copied first.
  absl::Status tensor(const std::string& name, const at::Tensor& tensor);
  // Row-major, little-endian bytes.
  absl::Status bytes(const std::string& name, absl::string_view bytes);

  // Others write the tensor's bytes, row-major, to the file at
  // temporary_path() and make them durable. Returns their place, in bytes from
  // the file's beginning.
  absl::StatusOr<int64_t> reserve(const std::string& name);

  // Errors: FailedPrecondition if an announced tensor did not come.
  absl::Status commit();

  const std::string& path() const { return file_->path(); }
  const std::string& temporary_path() const { return file_->temporary_path(); }
  size_t num_missing() const { return num_missing_; }

 private:
  struct Place {
    SafetensorsTensor tensor;
    int64_t begin;  // in the file
    int64_t size;
    bool is_written = false;
  };

  explicit SafetensorsWriter(std::unique_ptr<AtomicFile> file)
      : file_(std::move(file)) {}
  absl::Status write_header(const std::vector<SafetensorsTensor>& tensors,
                            const std::map<std::string, std::string>& metadata);
  absl::StatusOr<Place*> find(const std::string& name);
  absl::Status write(Place* place, absl::string_view bytes);
  void note_written(Place* place);
  absl::Status invalid(const std::string& name, absl::string_view what) const;

  std::unique_ptr<AtomicFile> file_;
  std::vector<Place> places_;
  std::unordered_map<std::string, size_t> index_;
  size_t num_missing_ = 0;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_SAFETENSORS_WRITER_H_
