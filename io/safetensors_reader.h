#ifndef FULLSHARD_IO_SAFETENSORS_READER_H_
#define FULLSHARD_IO_SAFETENSORS_READER_H_

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fullshard/io/safetensors_file.h"

namespace fullshard {

// Reads the tensors of a model in safetensors form by name: one file, or the
// files that a `model.safetensors.index.json` names, as Hugging Face folders
// hold them.
class SafetensorsReader {
 public:
  // A tensor's place: file and number in it.
  struct Tensor {
    const SafetensorsFile* file;
    size_t number;

    absl::string_view name() const { return file->name(number); }
  };

  // `path`: a file, an index, or a folder that holds model.safetensors.index
  // .json or model.safetensors (the index goes first).
  // Errors: those of SafetensorsFile; NotFound for a folder without either;
  // DataLoss for a malformed index, a file it names that is missing, or a
  // tensor that is not in the file it names.
  static absl::StatusOr<std::unique_ptr<SafetensorsReader>> open(
      const std::string& path);

  // One file: in the order of its header. An index: file by file, each in the
  // order of its header; a tensor that the index does not name is left out.
  const std::vector<Tensor>& tensors() const { return tensors_; }
  std::optional<Tensor> find(absl::string_view name) const;

  // The metadata of the first file.
  const std::map<std::string, std::string>& metadata() const;

  // As SafetensorsFile::tensor. Errors: also NotFound.
  absl::StatusOr<at::Tensor> tensor(absl::string_view name) const;

 private:
  explicit SafetensorsReader(std::string path) : path_(std::move(path)) {}
  absl::Status open_file(const std::string& path);
  absl::Status open_index(const std::string& path);

  const std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<Tensor> tensors_;
  std::vector<size_t> by_name_;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_SAFETENSORS_READER_H_
