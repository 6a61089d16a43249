#ifndef FULLSHARD_IO_MAPPED_FILE_H_
#define FULLSHARD_IO_MAPPED_FILE_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fullshard {

// A whole file in memory, copy-on-write: pages are read when touched, and a
// write to them never reaches the file. A file that another process cuts short
// while it is mapped ends this process with SIGBUS where the missing part is
// touched; readers ask check_whole() before they hand out a part. Files
// written by AtomicFile are replaced, never cut.
class MappedFile {
 public:
  // Errors: NotFound; InvalidArgument for a folder or an empty file; what the
  // system reports. The message names the path.
  static absl::StatusOr<std::shared_ptr<MappedFile>> open(
      const std::string& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }
  absl::string_view bytes() const { return {data_, size_}; }

  // Errors: DataLoss with the path if the file is shorter now than mapped.
  absl::Status check_whole() const;

  // Copies bytes [offset, offset + size) to `out` without mapping them, which
  // is faster for what is read once, and never ends the process.
  // Requires: they lie in the file as it was opened.
  // Errors: DataLoss if the file is shorter now; what the system reports.
  absl::Status read(size_t offset, size_t size, void* out) const;
  // Has the system fetch the first megabytes of these bytes, for a read().
  // Returns at once.
  void read_ahead(size_t offset, size_t size) const;

 private:
  MappedFile(std::string path, int fd, char* data, size_t size)
      : path_(std::move(path)), fd_(fd), data_(data), size_(size) {}
  absl::Status cut_short(size_t num_bytes) const;

  const std::string path_;
  const int fd_;
  char* const data_;
  const size_t size_;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_MAPPED_FILE_H_
