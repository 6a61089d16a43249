#ifndef FULLSHARD_IO_ATOMIC_FOLDER_H_
#define FULLSHARD_IO_ATOMIC_FOLDER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fullshard/io/file_system.h"

namespace fullshard {

// A folder that appears whole or not at all: its files are written in a hidden
// temporary folder beside `path`, which commit() renames. After `kill -9` that
// folder stays as `.<name>.<pid>-<n>.tmp` and nobody reads it.
class AtomicFolder {
 public:
  // Errors: AlreadyExists unless `path` is free or an empty folder; the parent
  // is missing or not writable.
  static absl::StatusOr<std::unique_ptr<AtomicFolder>> create(
      const std::string& path, FileSystem& file_system = FileSystem::posix());

  // Removes the temporary folder unless commit() succeeded.
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  const std::string& path() const { return path_; }

  // Where a file of the folder is written, durably, before commit().
  std::string file(const std::string& name) const {
    return temporary_ + "/" + name;
  }
  absl::Status add_file(const std::string& name, absl::string_view bytes);

  // Syncs the folder, renames it and syncs its parent. At most once.
  absl::Status commit();

 private:
  AtomicFolder(std::string path, std::string temporary,
               FileSystem& file_system);

  const std::string path_;
  const std::string temporary_;
  FileSystem& file_system_;
  bool open_ = true;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_ATOMIC_FOLDER_H_
