#ifndef FULLSHARD_IO_FILE_SYSTEM_H_
#define FULLSHARD_IO_FILE_SYSTEM_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace fullshard {

// The system calls that make a file durable. Writers take one, so that a test
// can fail or end the process at any of them; everyone else uses posix().
//
// Every call returns a value >= 0, or -errno.
class FileSystem {
 public:
  static FileSystem& posix();

  virtual ~FileSystem() = default;

  // Creates `path`, which must not exist, and returns its descriptor.
  virtual int create(const std::string& path);
  // Writes up to `size` bytes and returns how many.
  virtual ssize_t write(int fd, const void* data, size_t size);
  virtual int sync(int fd);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int symlink(const std::string& target, const std::string& path);
  virtual int sync_directory(const std::string& path);
  virtual int create_directory(const std::string& path);
  virtual int remove(const std::string& path);
  // Removes an empty folder.
  virtual int remove_directory(const std::string& path);
};

// The Status of a failed call: "cannot <action> <path>: <reason>".
absl::Status file_error(int negative_errno, const std::string& action,
                        const std::string& path);

// The folder that holds `path`; "." for a plain name.
std::string parent_directory(const std::string& path);

// The last component of `path`.
std::string base_name(const std::string& path);

}  // namespace fullshard

#endif  // FULLSHARD_IO_FILE_SYSTEM_H_
