#include "fullshard/core/shm_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "c10/util/Exception.h"

namespace fullshard {
namespace internal {

void UniqueFd::reset(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

UniqueFd create_memory_file(size_t num_bytes) {
  UniqueFd file(memfd_create("fullshard", MFD_CLOEXEC));
  TORCH_CHECK(file.valid(), "memfd_create failed: ", std::strerror(errno));
  TORCH_CHECK(ftruncate(file.get(), static_cast<off_t>(num_bytes)) == 0, "no ",
              num_bytes, " bytes of shared memory: ", std::strerror(errno));
  return file;
}

SharedMapping::SharedMapping(const UniqueFd& file, size_t num_bytes)
    : num_bytes_(num_bytes) {
  void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                    file.get(), 0);
  TORCH_CHECK(data != MAP_FAILED, "cannot map ", num_bytes,
              " bytes of shared memory: ", std::strerror(errno));
  data_ = static_cast<char*>(data);
}

SharedMapping::~SharedMapping() { munmap(data_, num_bytes_); }

size_t round_up_to_pages(size_t num_bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::max<size_t>(1, (num_bytes + page - 1) / page) * page;
}

}  // namespace internal
}  // namespace fullshard
