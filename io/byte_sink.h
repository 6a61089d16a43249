#ifndef FULLSHARD_IO_BYTE_SINK_H_
#define FULLSHARD_IO_BYTE_SINK_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "fullshard/io/file_system.h"

namespace fullshard {

// Takes bytes in order.
class ByteSink {
 public:
  virtual ~ByteSink() = default;

  // Lifetime: `data` is not used after the call.
  // Errors: what the medium reports; the sink is then unusable.
  virtual absl::Status append(const void* data, size_t size) = 0;

  // Continues at byte `offset`, which may lie beyond the end.
  virtual absl::Status seek(int64_t offset) = 0;

  // Hands everything to the medium and makes it durable.
  virtual absl::Status close() = 0;
};

// Appends to a file descriptor. Small pieces are gathered into one buffer;
// large ones go straight from the caller's memory to the kernel. Write-back to
// the disk starts early, so that close() has little left to wait for.
class FileSink : public ByteSink {
 public:
  static constexpr size_t kBufferBytes = size_t{1} << 20;

  // Takes ownership of `fd`; `path` is for messages.
  FileSink(int fd, std::string path,
           FileSystem& file_system = FileSystem::posix());
  // Closes the descriptor; what was not flushed is dropped.
  ~FileSink() override;
  FileSink(const FileSink&) = delete;
  FileSink& operator=(const FileSink&) = delete;

  absl::Status append(const void* data, size_t size) override;
  absl::Status seek(int64_t offset) override;
  // Flushes, fsyncs and closes. A second call does nothing.
  absl::Status close() override;

 private:
  absl::Status flush();
  absl::Status write_all(const char* data, size_t size);
  void start_write_back();

  int fd_;
  const std::string path_;
  FileSystem& file_system_;
  std::vector<char> buffer_;
  int64_t position_ = 0;          // of the next append()
  int64_t written_bytes_ = 0;     // end of what the kernel has
  int64_t write_back_bytes_ = 0;  // end of what it was told to write back
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_BYTE_SINK_H_
