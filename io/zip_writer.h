#ifndef FULLSHARD_IO_ZIP_WRITER_H_
#define FULLSHARD_IO_ZIP_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fullshard/io/byte_sink.h"

namespace fullshard {

// Writes a ZIP archive of stored (uncompressed) entries in one pass, as
// torch.save does: the data of every entry starts on a 64-byte boundary of the
// file, and its checksum follows it in a data descriptor, so nothing is written
// twice. ZIP64 records appear only where a size, an offset or the number of
// entries needs them.
class ZipWriter {
 public:
  static constexpr int64_t kAlignment = 64;
  static constexpr uint64_t kZip64Limit = 0xffffffff;

  // Lifetime: `sink` outlives the writer, which never closes it.
  // A test can lower `zip64_limit` to see ZIP64 records in small files.
  explicit ZipWriter(ByteSink& sink, uint64_t zip64_limit = kZip64Limit);

  static constexpr size_t kPieceBytes = size_t{1} << 20;

  // Writes one whole entry. `piece_crcs`, if given, becomes the CRC-32 of every
  // kPieceBytes of the data. Requires: `name` was not used before.
  absl::Status add(absl::string_view name, const void* data, size_t size,
                   std::vector<uint32_t>* piece_crcs = nullptr);
  absl::Status add(absl::string_view name, absl::string_view data) {
    return add(name, data.data(), data.size());
  }

  // Writes an entry without its data, of `size` bytes, which others write to
  // the file at last_data_offset(). Returns its number, for complete().
  // Requires: the sink can seek.
  absl::StatusOr<size_t> reserve(absl::string_view name, uint64_t size);
  // The data of a reserved entry is there and has this CRC-32.
  absl::Status complete(size_t entry, uint32_t crc);

  // Writes the central directory. No call may follow.
  // Errors: FailedPrecondition for a reserved entry that is not complete.
  absl::Status finish();

  int64_t num_bytes() const { return static_cast<int64_t>(offset_); }
  // Where the data of the entry that was added last begins.
  int64_t last_data_offset() const { return last_data_offset_; }

 private:
  struct Entry {
    std::string name;
    uint64_t header_offset;
    uint64_t size;
    uint32_t crc;
    uint64_t descriptor_offset = 0;
    bool complete = true;
  };

  absl::StatusOr<Entry> begin_entry(absl::string_view name, uint64_t size);
  absl::Status write(const std::string& bytes);
  absl::Status write_data(const char* data, size_t size, Entry* entry,
                          std::vector<uint32_t>* piece_crcs);
  std::string local_header(absl::string_view name, uint64_t size) const;
  std::string data_descriptor(const Entry& entry) const;
  void append_directory_entry(const Entry& entry, std::string* out) const;
  bool is_zip64(uint64_t value) const { return value >= zip64_limit_; }

  ByteSink& sink_;
  const uint64_t zip64_limit_;
  uint64_t offset_ = 0;
  int64_t last_data_offset_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_ZIP_WRITER_H_
