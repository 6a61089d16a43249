#ifndef FULLSHARD_CORE_SHM_MEMORY_H_
#define FULLSHARD_CORE_SHM_MEMORY_H_

#include <cstddef>
#include <memory>

namespace fullshard {
namespace internal {

// A file descriptor that closes itself.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    reset(other.release());
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() {
    int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// Creates `num_bytes` of zeroed anonymous memory that other processes can map.
// It has no name in any file system and vanishes with its last user. Pages
// exist from their first touch on.
//
// Errors: c10::Error with the system's words.
UniqueFd create_memory_file(size_t num_bytes);

// A mapping of a memory file, shared with every process that maps the same
// one. Unmapped with the object; the file itself may be closed before.
class SharedMapping {
 public:
  // Errors: c10::Error with the system's words.
  SharedMapping(const UniqueFd& file, size_t num_bytes);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  char* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  char* data_;
  size_t num_bytes_;
};

// Returns `num_bytes` rounded up to whole pages, at least one.
size_t round_up_to_pages(size_t num_bytes);

}  // namespace internal
}  // namespace fullshard

#endif  // FULLSHARD_CORE_SHM_MEMORY_H_
