#include "fullshard/io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "fullshard/io/file_system.h"

namespace fullshard {

absl::StatusOr<std::shared_ptr<MappedFile>> MappedFile::open(
    const std::string& path) {
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return file_error(-errno, "open", path);
  struct stat info;
  const int error = ::fstat(fd, &info) < 0 ? -errno : 0;
  void* data = nullptr;
  int map_error = 0;
  if (error == 0 && S_ISREG(info.st_mode) && info.st_size > 0) {
    data = ::mmap(nullptr, static_cast<size_t>(info.st_size),
                  PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    map_error = data == MAP_FAILED ? -errno : 0;
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
  return absl::DataLossError(
      absl::StrCat(path_, " was cut short while it was read: ", info.st_size,
                   " bytes, expected ", size_));
}

}  // namespace fullshard
