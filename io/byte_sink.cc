#include "fullshard/io/byte_sink.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "fullshard/core/status.h"

namespace fullshard {
namespace {

constexpr int64_t kWriteBackBytes = int64_t{16} << 20;
constexpr size_t kLargestWriteBytes = size_t{1} << 30;

}  // namespace

FileSink::FileSink(int fd, std::string path, FileSystem& file_system)
    : fd_(fd), path_(std::move(path)), file_system_(file_system) {
  buffer_.reserve(kBufferBytes);
}

FileSink::~FileSink() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status FileSink::append(const void* data, size_t size) {
  if (fd_ < 0) {
    return absl::FailedPreconditionError("write to closed file " + path_);
  }
  const char* bytes = static_cast<const char*>(data);
  position_ += static_cast<int64_t>(size);
  if (buffer_.size() + size > kBufferBytes) {
    FS_RETURN_IF_ERROR(flush());
    if (size >= kBufferBytes / 2) return write_all(bytes, size);
  }
  buffer_.insert(buffer_.end(), bytes, bytes + size);
  return absl::OkStatus();
}

absl::Status FileSink::seek(int64_t offset) {
  if (offset == position_) return absl::OkStatus();
  FS_RETURN_IF_ERROR(flush());
  if (::lseek(fd_, offset, SEEK_SET) < 0) {
    return file_error(-errno, "seek in", path_);
  }
  position_ = written_bytes_ = write_back_bytes_ = offset;
  return absl::OkStatus();
}

absl::Status FileSink::flush() {
  absl::Status status = write_all(buffer_.data(), buffer_.size());
  buffer_.clear();
  return status;
}

absl::Status FileSink::write_all(const char* data, size_t size) {
  while (size > 0) {
    const ssize_t count =
        file_system_.write(fd_, data, std::min(size, kLargestWriteBytes));
    if (count == -EINTR) continue;
    if (count <= 0) {
      const int error = count == 0 ? -EIO : static_cast<int>(count);
      return file_error(error, "write", path_);
    }
    data += count;
    size -= static_cast<size_t>(count);
    written_bytes_ += count;
  }
  start_write_back();
  return absl::OkStatus();
}

void FileSink::start_write_back() {
#ifdef SYNC_FILE_RANGE_WRITE
  const int64_t ready = written_bytes_ - write_back_bytes_;
  if (ready < kWriteBackBytes) return;
  // Only a hint: an error here shows up again in fsync.
  (void)::sync_file_range(fd_, write_back_bytes_, ready, SYNC_FILE_RANGE_WRITE);
  write_back_bytes_ = written_bytes_;
#endif
}

absl::Status FileSink::close() {
  if (fd_ < 0) return absl::OkStatus();
  FS_RETURN_IF_ERROR(flush());
  const int synced = file_system_.sync(fd_);
  const int closed = ::close(std::exchange(fd_, -1));
  if (synced < 0) return file_error(synced, "sync", path_);
  if (closed < 0) return file_error(-errno, "close", path_);
  return absl::OkStatus();
}

}  // namespace fullshard
