#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "fullshard/tests/io/fuzz/fuzz_target.h"

namespace fullshard {

FuzzFile::FuzzFile()
    : fd_(::memfd_create("fuzz", MFD_CLOEXEC)),
      path_("/proc/self/fd/" + std::to_string(fd_)) {}

FuzzFile::~FuzzFile() { ::close(fd_); }

const std::string& FuzzFile::set(const uint8_t* data, size_t size) {
  if (::ftruncate(fd_, 0) != 0 ||
      ::pwrite(fd_, data, size, 0) != static_cast<ssize_t>(size)) {
    __builtin_trap();
  }
  return path_;
}

}  // namespace fullshard
