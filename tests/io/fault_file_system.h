#ifndef FULLSHARD_TESTS_IO_FAULT_FILE_SYSTEM_H_
#define FULLSHARD_TESTS_IO_FAULT_FILE_SYSTEM_H_

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "fullshard/io/file_system.h"

namespace fullshard {

// Counts calls, but those that clean up, and fails or kills the process at one
// of them.
class FaultFileSystem : public FileSystem {
 public:
  enum class Fault { kError, kKill };

  int fail_at = -1;  // the number of the call, from 0
  Fault fault = Fault::kError;
  int error = ENOSPC;
  size_t largest_write = ~size_t{0};
  size_t largest_read = ~size_t{0};
  int num_calls = 0;

  int create(const std::string& path) override {
    return fails() ? -error : FileSystem::create(path);
  }
  int open_to_write(const std::string& path) override {
    return fails() ? -error : FileSystem::open_to_write(path);
  }
  ssize_t write(int fd, const void* data, size_t size) override {
    if (fails()) return -error;
    return FileSystem::write(fd, data, std::min(size, largest_write));
  }
  int sync(int fd) override { return fails() ? -error : FileSystem::sync(fd); }
  int rename(const std::string& from, const std::string& to) override {
    return fails() ? -error : FileSystem::rename(from, to);
  }
  int symlink(const std::string& target, const std::string& path) override {
    return fails() ? -error : FileSystem::symlink(target, path);
  }
  int create_directory(const std::string& path) override {
    return fails() ? -error : FileSystem::create_directory(path);
  }
  int sync_directory(const std::string& path) override {
    return fails() ? -error : FileSystem::sync_directory(path);
  }
  int open_to_read(const std::string& path) override {
    return fails() ? -error : FileSystem::open_to_read(path);
  }
  ssize_t read_at(int fd, void* data, size_t size, int64_t offset) override {
    if (fails()) return -error;
    return FileSystem::read_at(fd, data, std::min(size, largest_read), offset);
  }
  int map(int fd, size_t size, void** data) override {
    return fails() ? -error : FileSystem::map(fd, size, data);
  }

 private:
  bool fails() {
    if (num_calls++ != fail_at) return false;
    if (fault == Fault::kKill) ::kill(::getpid(), SIGKILL);
    return true;
  }
};

}  // namespace fullshard

#endif  // FULLSHARD_TESTS_IO_FAULT_FILE_SYSTEM_H_
