#include "fullshard/io/file_system.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "absl/strings/str_cat.h"

namespace fullshard {
namespace {

template <class T>
T or_errno(T result) {
  return result < 0 ? static_cast<T>(-errno) : result;
}

std::atomic<FileSystem*> for_readers_of_process{nullptr};

}  // namespace

FileSystem& FileSystem::posix() {
  static FileSystem* const file_system = new FileSystem();
  return *file_system;
}

FileSystem& FileSystem::for_readers() {
  FileSystem* const file_system = for_readers_of_process.load();
  return file_system == nullptr ? posix() : *file_system;
}

void FileSystem::set_for_readers(FileSystem* file_system) {
  for_readers_of_process = file_system;
}

int FileSystem::create(const std::string& path) {
  return or_errno(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
}

int FileSystem::open_to_write(const std::string& path) {
  return or_errno(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
}

ssize_t FileSystem::write(int fd, const void* data, size_t size) {
  return or_errno(::write(fd, data, size));
}

int FileSystem::set_direct(int fd, bool value) {
#ifdef O_DIRECT
  const int flags = or_errno(::fcntl(fd, F_GETFL));
  if (flags < 0) return flags;
  return or_errno(
      ::fcntl(fd, F_SETFL, value ? flags | O_DIRECT : flags & ~O_DIRECT));
#else
  (void)fd;
  return value ? -EINVAL : 0;
#endif
}

int FileSystem::sync(int fd) { return or_errno(::fsync(fd)); }

int FileSystem::rename(const std::string& from, const std::string& to) {
  return or_errno(::rename(from.c_str(), to.c_str()));
}

int FileSystem::symlink(const std::string& target, const std::string& path) {
  return or_errno(::symlink(target.c_str(), path.c_str()));
}

int FileSystem::sync_directory(const std::string& path) {
  const int fd =
      or_errno(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd < 0) return fd;
  int result = or_errno(::fsync(fd));
  ::close(fd);
  // Some file systems cannot sync a folder; there a rename is durable at once.
  return result == -EINVAL ? 0 : result;
}

int FileSystem::remove(const std::string& path) {
  return or_errno(::unlink(path.c_str()));
}

int FileSystem::create_directory(const std::string& path) {
  return or_errno(::mkdir(path.c_str(), 0777));
}

int FileSystem::remove_directory(const std::string& path) {
  return or_errno(::rmdir(path.c_str()));
}

int FileSystem::open_to_read(const std::string& path) {
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  return or_errno(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
}

ssize_t FileSystem::read_at(int fd, void* data, size_t size, int64_t offset) {
  return or_errno(::pread(fd, data, size, offset));
}

int FileSystem::map(int fd, size_t size, void** data) {
  void* const mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_NORESERVE, fd, 0);
  if (mapped == MAP_FAILED) return -errno;
  *data = mapped;
  return 0;
}

absl::Status file_error(int negative_errno, const std::string& action,
                        const std::string& path) {
  return absl::ErrnoToStatus(-negative_errno,
                             absl::StrCat("cannot ", action, " ", path));
}

std::string parent_directory(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string base_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

}  // namespace fullshard
