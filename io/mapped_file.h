#ifndef FULLSHARD_IO_MAPPED_FILE_H_
#define FULLSHARD_IO_MAPPED_FILE_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fullshard {

// A whole file in memory, copy-on-write: pages are read when touched, and a
// write to them never reaches the file. A file that another process cuts short
// while it is mapped ends this process with SIGBUS; files written by AtomicFile
// are replaced, never cut.
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

 private:
  MappedFile(char* data, size_t size) : data_(data), size_(size) {}

  char* const data_;
  const size_t size_;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_MAPPED_FILE_H_
