#include "fullshard/io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/file_system.h"

namespace fullshard {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;
// What the disk works on beside a copy.
constexpr size_t kAheadBytes = 2 * kPieceBytes;

}  // namespace

absl::StatusOr<std::shared_ptr<MappedFile>> MappedFile::open(
    const std::string& path) {
  FileSystem& file_system = FileSystem::for_readers();
  const int fd = file_system.open_to_read(path);
  if (fd < 0) return file_error(fd, "open", path);
  struct stat info;
  const int error = ::fstat(fd, &info) < 0 ? -errno : 0;
  void* data = nullptr;
  int map_error = 0;
  if (error == 0 && S_ISREG(info.st_mode) && info.st_size > 0) {
    map_error = file_system.map(fd, static_cast<size_t>(info.st_size), &data);
  }
  const auto close_with = [fd](absl::Status status) {
    ::close(fd);
    return status;
  };
  if (error < 0) return close_with(file_error(error, "stat", path));
  if (S_ISDIR(info.st_mode)) {
    return close_with(absl::InvalidArgumentError(
        absl::StrCat(path, " is a folder, expected a file")));
  }
  if (!S_ISREG(info.st_mode)) {
    return close_with(absl::InvalidArgumentError(
        absl::StrCat(path, " is not a regular file")));
  }
  if (info.st_size == 0) {
    return close_with(
        absl::InvalidArgumentError(absl::StrCat(path, " is empty")));
  }
  if (map_error < 0) return close_with(file_error(map_error, "map", path));
  return std::shared_ptr<MappedFile>(new MappedFile(
      path, fd, static_cast<char*>(data), static_cast<size_t>(info.st_size)));
}

MappedFile::~MappedFile() {
  ::munmap(data_, size_);
  ::close(fd_);
}

absl::Status MappedFile::check_whole() const {
  struct stat info;
  if (::fstat(fd_, &info) < 0) return file_error(-errno, "stat", path_);
  if (static_cast<size_t>(info.st_size) >= size_) return absl::OkStatus();
  return cut_short(static_cast<size_t>(info.st_size));
}

absl::Status MappedFile::cut_short(size_t num_bytes) const {
  return absl::DataLossError(
      absl::StrCat(path_, " was cut short while it was read: ", num_bytes,
                   " bytes, expected ", size_));
}

absl::Status MappedFile::read(size_t offset, size_t size, void* out) const {
  FileSystem& file_system = FileSystem::for_readers();
  char* to = static_cast<char*>(out);
  while (size > 0) {
    const size_t piece = std::min(size, kPieceBytes);
    if (size > piece) read_ahead(offset + piece, size - piece);
    const ssize_t count =
        file_system.read_at(fd_, to, piece, static_cast<int64_t>(offset));
    if (count == -EINTR) continue;
    if (count < 0) {
      return file_error(static_cast<int>(count), "read", path_);
    }
    if (count == 0) {
      FS_RETURN_IF_ERROR(check_whole());
      return cut_short(offset);  // And grew again.
    }
    offset += static_cast<size_t>(count);
    to += count;
    size -= static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

void MappedFile::read_ahead(size_t offset, size_t size) const {
  (void)::posix_fadvise(fd_, static_cast<off_t>(offset),
                        static_cast<off_t>(std::min(size, kAheadBytes)),
                        POSIX_FADV_WILLNEED);
}

}  // namespace fullshard
