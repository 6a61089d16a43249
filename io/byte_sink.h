#ifndef FULLSHARD_IO_BYTE_SINK_H_
#define FULLSHARD_IO_BYTE_SINK_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

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

// Writes to a file descriptor through a buffer of 4 MiB. Runs of at least 512
// KiB of whole blocks go past the page cache (O_DIRECT) where the file system
// can: faster on a disk that keeps up with a copy of memory, and what training
// has cached stays. The rest is written the ordinary way.
class FileSink : public ByteSink {
 public:
  static constexpr size_t kBufferBytes = size_t{4} << 20;

  // Takes ownership of `fd`, at its beginning; `path` is for messages.
  FileSink(int fd, std::string path,
           FileSystem& file_system = FileSystem::posix());
  // Closes the descriptor; what was not flushed is dropped.
  ~FileSink() override;
  FileSink(const FileSink&) = delete;
  FileSink& operator=(const FileSink&) = delete;

  absl::Status append(const void* data, size_t size) override;
  absl::Status seek(int64_t offset) override;
  // Flushes, fsyncs and closes. A second call does nothing. After an error in
  // flushing the descriptor stays open until the sink is destroyed.
  absl::Status close() override;

 private:
  enum class Drain { kWholeBlocks, kEverything };
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  // Writes what the buffer holds; kWholeBlocks keeps an unfinished last block.
  absl::Status drain(Drain what);
  // Empties the buffer, to go on at that byte of the file.
  void restart_at(int64_t offset);
  // Of the buffer's bytes [begin, end).
  absl::Status write_blocks(size_t begin, size_t end);
  absl::Status write_all(size_t begin, size_t end);
  // Puts the descriptor there.
  absl::Status move_to(int64_t offset);

  int fd_;
  const std::string path_;
  FileSystem& file_system_;
  // A byte's place in its block is the same here and in the file.
  std::unique_ptr<char, Free> buffer_;
  int64_t base_ = 0;  // Of the buffer in the file; a multiple of a block.
  size_t begin_ = 0;  // What it holds that is not written:
  size_t end_ = 0;    // [begin_, end_).
  int64_t fd_position_ = 0;  // Where the kernel would write.
  bool may_be_direct_ = true;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_BYTE_SINK_H_
