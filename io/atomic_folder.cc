#include "fullshard/io/atomic_folder.h"

#include <cerrno>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/atomic_file.h"

namespace fullshard {
namespace {

std::string without_end_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

absl::Status check_free(const std::string& path) {
  std::error_code error;
  const bool is_free = !std::filesystem::exists(path, error) ||
                       (std::filesystem::is_directory(path, error) &&
                        std::filesystem::is_empty(path, error));
  if (is_free && !error) return absl::OkStatus();
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot look at ", path, ": ", error.message()));
  }
  return absl::AlreadyExistsError(
      absl::StrCat(path, " exists, expected a new or empty folder"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<AtomicFolder>> AtomicFolder::create(
    const std::string& given, FileSystem& file_system) {
  const std::string path = without_end_slashes(given);
  FS_RETURN_IF_ERROR(check_free(path));
  std::string temporary = temporary_name(path);
  if (const int error = file_system.create_directory(temporary); error < 0) {
    return file_error(error, "create folder", temporary);
  }
  return std::unique_ptr<AtomicFolder>(
      new AtomicFolder(path, std::move(temporary), file_system));
}

AtomicFolder::AtomicFolder(std::string path, std::string temporary,
                           FileSystem& file_system)
    : path_(std::move(path)),
      temporary_(std::move(temporary)),
      file_system_(file_system) {}

AtomicFolder::~AtomicFolder() {
  if (!open_) return;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator(temporary_, ignored)) {
    file_system_.remove(entry.path().string());
  }
  file_system_.remove_directory(temporary_);
}

absl::Status AtomicFolder::add_file(const std::string& name,
                                    absl::string_view bytes) {
  FS_ASSIGN_OR_RETURN(const std::unique_ptr<AtomicFile> out,
                      AtomicFile::create(file(name), file_system_));
  FS_RETURN_IF_ERROR(out->sink().append(bytes.data(), bytes.size()));
  return out->commit();
}

absl::Status AtomicFolder::commit() {
  if (!open_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, " was committed before"));
  }
  if (const int error = file_system_.sync_directory(temporary_); error < 0) {
    return file_error(error, "sync folder", temporary_);
  }
  FS_RETURN_IF_ERROR(check_free(path_));
  if (const int error = file_system_.rename(temporary_, path_); error < 0) {
    return file_error(error, absl::StrCat("rename ", temporary_, " to"), path_);
  }
  open_ = false;
  const std::string parent = parent_directory(path_);
  if (const int error = file_system_.sync_directory(parent); error < 0) {
    return file_error(error, "sync folder", parent);
  }
  return absl::OkStatus();
}

}  // namespace fullshard
