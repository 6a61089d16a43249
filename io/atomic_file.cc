#include "fullshard/io/atomic_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"

namespace fullshard {
namespace {

bool is_directory(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

absl::Status rename_durably(const std::string& from, const std::string& to,
                            FileSystem& file_system) {
  if (const int error = file_system.rename(from, to); error < 0) {
    file_system.remove(from);
    return file_error(error, absl::StrCat("rename ", from, " to"), to);
  }
  const std::string directory = parent_directory(to);
  if (const int error = file_system.sync_directory(directory); error < 0) {
    return file_error(error, "sync folder", directory);
  }
  return absl::OkStatus();
}

}  // namespace

std::string temporary_name(const std::string& path) {
  static std::atomic<int> counter{0};
  return absl::StrCat(parent_directory(path), "/.", base_name(path), ".",
                      ::getpid(), "-", counter.fetch_add(1), ".tmp");
}

absl::StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::create(
    const std::string& path, FileSystem& file_system) {
  if (base_name(path).empty() || is_directory(path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot write \"", path, "\": not a file name"));
  }
  std::string temporary = temporary_name(path);
  const int fd = file_system.create(temporary);
  if (fd < 0) return file_error(fd, "create", temporary);
  return std::unique_ptr<AtomicFile>(
      new AtomicFile(path, std::move(temporary), fd, file_system));
}

AtomicFile::AtomicFile(std::string path, std::string temporary, int fd,
                       FileSystem& file_system)
    : path_(std::move(path)),
      temporary_(std::move(temporary)),
      file_system_(file_system),
      sink_(fd, temporary_, file_system) {}

AtomicFile::~AtomicFile() { abort(); }

absl::Status AtomicFile::commit() {
  if (!open_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, " was committed or aborted before"));
  }
  if (absl::Status status = sink_.close(); !status.ok()) {
    abort();
    return status;
  }
  open_ = false;
  return rename_durably(temporary_, path_, file_system_);
}

void AtomicFile::abort() {
  if (!std::exchange(open_, false)) return;
  file_system_.remove(temporary_);
}

absl::Status replace_symlink(const std::string& target, const std::string& path,
                             FileSystem& file_system) {
  const std::string temporary = temporary_name(path);
  if (const int error = file_system.symlink(target, temporary); error < 0) {
    return file_error(error, "link", temporary);
  }
  return rename_durably(temporary, path, file_system);
}

}  // namespace fullshard
