#ifndef FULLSHARD_IO_SAFETENSORS_FILE_H_
#define FULLSHARD_IO_SAFETENSORS_FILE_H_

#include <ATen/core/Tensor.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fullshard/io/json_scanner.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/safetensors_dtype.h"

namespace fullshard {

// One safetensors file: eight bytes of header length, a JSON header, and the
// tensors' bytes without gaps. Opening reads the header only, and costs about
// its size in memory; tensors are views of the mapped file.
class SafetensorsFile {
 public:
  static constexpr int64_t kMaxHeaderBytes = 100'000'000;

  // Errors, all with the path: NotFound; InvalidArgument for what is no
  // safetensors file; DataLoss for a file that is cut short or whose header is
  // malformed: too long, a key twice, ranges that overlap, leave a gap or do
  // not fit a tensor's shape and dtype.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> open(
      const std::string& path);

  const std::string& path() const { return path_; }

  // The tensors, in the header's order.
  size_t size() const { return entries_.size(); }
  absl::string_view name(size_t i) const { return entries_[i].name; }
  const SafetensorsDtype& dtype(size_t i) const { return *entries_[i].dtype; }
  std::vector<int64_t> shape(size_t i) const;
  absl::string_view bytes(size_t i) const;
  std::optional<size_t> find(absl::string_view name) const;

  // `__metadata__`.
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }

  // Returns tensor i as a view of the file, without reading it; a copy where
  // the file does not align it to its element. Writing to it changes memory,
  // never the file.
  // Lifetime: the tensor keeps the mapping alive, not the reader.
  // Errors: Unimplemented for the 6-bit floats, which LibTorch lacks; DataLoss
  // if the file was cut short since.
  absl::StatusOr<at::Tensor> tensor(size_t i) const;
  absl::Status check_whole() const { return file_->check_whole(); }

 private:
  // Everything but the name is in the file; a shape is read when asked for.
  struct Entry {
    absl::string_view name;
    absl::string_view shape;  // "[2, 3]"
    const SafetensorsDtype* dtype;
    int64_t begin;  // in the data
    int64_t end;
  };

  SafetensorsFile(std::string path, std::shared_ptr<MappedFile> file)
      : path_(std::move(path)), file_(std::move(file)) {}
  absl::Status read_header();
  absl::Status read_metadata(JsonScanner* json);
  absl::Status read_entry(absl::string_view name, JsonScanner* json);
  absl::Status check_entry(const Entry& entry) const;
  absl::Status check_ranges() const;
  absl::Status build_index();
  absl::StatusOr<absl::string_view> decode(absl::string_view raw);

  const std::string path_;
  const std::shared_ptr<MappedFile> file_;
  absl::string_view data_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> by_name_;
  std::deque<std::string> decoded_;  // names that had escapes
  std::map<std::string, std::string> metadata_;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_SAFETENSORS_FILE_H_
