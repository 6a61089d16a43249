#ifndef FULLSHARD_IO_FILE_SYSTEM_H_
#define FULLSHARD_IO_FILE_SYSTEM_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace fullshard {

// The system calls that make a file durable and read it. Writers take one and
// readers share one, so that a test can fail or end the process at any of them;
// everyone else uses posix().
//
// Every call returns a value >= 0, or -errno.
class FileSystem {
 public:
  static FileSystem& posix();
  // What readers use: posix(), unless a test has set another one, for the whole
  // process. Null: posix() again.
  static FileSystem& for_readers();
  static void set_for_readers(FileSystem* file_system);

  virtual ~FileSystem() = default;

  // Creates `path`, which must not exist, and returns its descriptor.
  virtual int create(const std::string& path);
  // Opens a file that exists, to write parts of it.
  virtual int open_to_write(const std::string& path);
  // Writes up to `size` bytes and returns how many.
  virtual ssize_t write(int fd, const void* data, size_t size);
  // Lets writes go past the page cache (O_DIRECT), or not; -EINVAL where the
  // file system cannot.
  virtual int set_direct(int fd, bool value);
  virtual int sync(int fd);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int symlink(const std::string& target, const std::string& path);
  virtual int sync_directory(const std::string& path);
  virtual int create_directory(const std::string& path);
  virtual int remove(const std::string& path);
  // Removes an empty folder.
  virtual int remove_directory(const std::string& path);

  virtual int open_to_read(const std::string& path);
  // Reads up to `size` bytes from byte `offset` on and returns how many.
  virtual ssize_t read_at(int fd, void* data, size_t size, int64_t offset);
  // Maps the first `size` bytes, copy-on-write, and sets `data` to them.
  virtual int map(int fd, size_t size, void** data);
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
