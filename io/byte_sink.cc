#include "fullshard/io/byte_sink.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "fullshard/core/status.h"

namespace fullshard {
namespace {

// A multiple of what O_DIRECT asks of offsets, sizes and addresses, and of a
// page: none is then written both ways, also not by ranks that share the file.
constexpr size_t kBlockBytes = size_t{64} << 10;
// Below this the page cache is faster.
constexpr size_t kSmallestDirectBytes = size_t{512} << 10;

size_t round_down(size_t value) { return value / kBlockBytes * kBlockBytes; }
size_t round_up(size_t value) { return round_down(value + kBlockBytes - 1); }

}  // namespace

FileSink::FileSink(int fd, std::string path, FileSystem& file_system)
    : fd_(fd),
      path_(std::move(path)),
      file_system_(file_system),
      buffer_(
          static_cast<char*>(std::aligned_alloc(kBlockBytes, kBufferBytes))) {}

FileSink::~FileSink() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status FileSink::append(const void* data, size_t size) {
  if (fd_ < 0) {
    return absl::FailedPreconditionError("write to closed file " + path_);
  }
  if (buffer_ == nullptr) {
    return absl::ResourceExhaustedError("no memory to write " + path_);
  }
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    if (end_ == kBufferBytes) FS_RETURN_IF_ERROR(drain(Drain::kWholeBlocks));
    const size_t piece = std::min(size, kBufferBytes - end_);
    std::memcpy(buffer_.get() + end_, bytes, piece);
    end_ += piece;
    bytes += piece;
    size -= piece;
  }
  return absl::OkStatus();
}

absl::Status FileSink::seek(int64_t offset) {
  if (offset == base_ + static_cast<int64_t>(end_)) return absl::OkStatus();
  FS_RETURN_IF_ERROR(drain(Drain::kEverything));
  restart_at(offset);
  return absl::OkStatus();
}

void FileSink::restart_at(int64_t offset) {
  begin_ = end_ = static_cast<size_t>(offset) % kBlockBytes;
  base_ = offset - static_cast<int64_t>(begin_);
}

absl::Status FileSink::drain(Drain what) {
  const size_t first = round_up(begin_);
  const size_t last = round_down(end_);
  if (!may_be_direct_ || last < first + kSmallestDirectBytes) {
    FS_RETURN_IF_ERROR(write_all(begin_, end_));
    restart_at(base_ + static_cast<int64_t>(end_));
    return absl::OkStatus();
  }
  FS_RETURN_IF_ERROR(write_all(begin_, first));
  FS_RETURN_IF_ERROR(write_blocks(first, last));
  if (what == Drain::kEverything) {
    FS_RETURN_IF_ERROR(write_all(last, end_));
    restart_at(base_ + static_cast<int64_t>(end_));
    return absl::OkStatus();
  }
  std::memmove(buffer_.get(), buffer_.get() + last, end_ - last);
  base_ += static_cast<int64_t>(last);
  begin_ = 0;
  end_ -= last;
  return absl::OkStatus();
}

absl::Status FileSink::write_blocks(size_t begin, size_t end) {
  if (file_system_.set_direct(fd_, true) < 0) {
    may_be_direct_ = false;
    return write_all(begin, end);
  }
  FS_RETURN_IF_ERROR(move_to(base_ + static_cast<int64_t>(begin)));
  ssize_t count = 0;
  do {
    count = file_system_.write(fd_, buffer_.get() + begin, end - begin);
  } while (count == -EINTR);
  (void)file_system_.set_direct(fd_, false);
  if (count == -EINVAL) {
    may_be_direct_ = false;
  } else if (count < 0) {
    return file_error(static_cast<int>(count), "write", path_);
  } else {
    fd_position_ += count;
    begin += static_cast<size_t>(count);
  }
  return write_all(begin, end);  // The rest of a short write.
}

absl::Status FileSink::write_all(size_t begin, size_t end) {
  if (begin == end) return absl::OkStatus();
  FS_RETURN_IF_ERROR(move_to(base_ + static_cast<int64_t>(begin)));
  while (begin < end) {
    const ssize_t count =
        file_system_.write(fd_, buffer_.get() + begin, end - begin);
    if (count == -EINTR) continue;
    if (count <= 0) {
      const int error = count == 0 ? -EIO : static_cast<int>(count);
      return file_error(error, "write", path_);
    }
    begin += static_cast<size_t>(count);
    fd_position_ += count;
  }
  return absl::OkStatus();
}

absl::Status FileSink::move_to(int64_t offset) {
  if (offset == fd_position_) return absl::OkStatus();
  if (::lseek(fd_, offset, SEEK_SET) < 0) {
    return file_error(-errno, "seek in", path_);
  }
  fd_position_ = offset;
  return absl::OkStatus();
}

absl::Status FileSink::close() {
  if (fd_ < 0) return absl::OkStatus();
  FS_RETURN_IF_ERROR(drain(Drain::kEverything));
  const int synced = file_system_.sync(fd_);
  const int closed = ::close(std::exchange(fd_, -1));
  if (synced < 0) return file_error(synced, "sync", path_);
  if (closed < 0) return file_error(-errno, "close", path_);
  return absl::OkStatus();
}

}  // namespace fullshard
