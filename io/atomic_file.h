#ifndef FULLSHARD_IO_ATOMIC_FILE_H_
#define FULLSHARD_IO_ATOMIC_FILE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/io/byte_sink.h"
#include "fullshard/io/file_system.h"

namespace fullshard {

// A file that appears whole or not at all. Bytes go to a hidden temporary file
// in the same folder; commit() makes them durable and renames it over `path`.
// Until then, and after any failure, what was at `path` is untouched. Without
// commit() the destructor removes the temporary file; after `kill -9` it stays
// as `.<name>.<pid>-<n>.tmp` and nobody reads it.
class AtomicFile {
 public:
  // Errors: the folder is missing or not writable, `path` is a folder.
  static absl::StatusOr<std::unique_ptr<AtomicFile>> create(
      const std::string& path, FileSystem& file_system = FileSystem::posix());

  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::string& path() const { return path_; }
  // Where the bytes are until commit(). Others may write parts of it that this
  // one does not, and sync them before commit().
  const std::string& temporary_path() const { return temporary_; }
  FileSink& sink() { return sink_; }

  // Syncs the file, renames it and syncs the folder. At most once.
  // Errors: any of these steps failed; only if the last one did, `path` may
  // already hold the new file.
  absl::Status commit();

  // Removes the temporary file. Does nothing after commit() or abort().
  void abort();

 private:
  AtomicFile(std::string path, std::string temporary, int fd,
             FileSystem& file_system);

  const std::string path_;
  const std::string temporary_;
  FileSystem& file_system_;
  FileSink sink_;
  bool open_ = true;
};

// A hidden name beside `path` that this process did not use before:
// `.<name>.<pid>-<n>.tmp`.
std::string temporary_name(const std::string& path);

// Makes `path` a symbolic link to `target`, replacing a file or link there
// atomically.
absl::Status replace_symlink(const std::string& target, const std::string& path,
                             FileSystem& file_system = FileSystem::posix());

}  // namespace fullshard

#endif  // FULLSHARD_IO_ATOMIC_FILE_H_
