#ifndef FULLSHARD_IO_ZIP_READER_H_
#define FULLSHARD_IO_ZIP_READER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fullshard {

// Finds the stored entries of a ZIP archive in memory. Trusts nothing in it:
// every offset and size is checked before use.
class ZipReader {
 public:
  struct Entry {
    absl::string_view name;
    uint64_t header_offset;
    uint64_t size;
    uint32_t crc;
    bool is_stored;  // else compressed or encrypted
  };

  // Reads the central directory, at a cost in memory of about its size.
  // Lifetime: `bytes` outlives the reader and every view it returns.
  // Errors: DataLoss where the archive is cut short or inconsistent.
  static absl::StatusOr<ZipReader> open(absl::string_view bytes);

  const std::vector<Entry>& entries() const { return entries_; }

  // Returns the entry `name`, or nullptr.
  const Entry* find(absl::string_view name) const;

  // Returns the bytes of an entry without reading them.
  // Errors: DataLoss if its local header is damaged or reaches out of the
  // file; Unimplemented for a compressed or encrypted entry.
  absl::StatusOr<absl::string_view> data(const Entry& entry) const;

  // Reads the entry and compares its checksum.
  absl::Status verify(const Entry& entry) const;

 private:
  struct Directory {
    uint64_t offset;
    uint64_t num_bytes;
    uint64_t num_entries;
  };

  explicit ZipReader(absl::string_view bytes) : bytes_(bytes) {}
  absl::StatusOr<Directory> find_directory() const;
  absl::StatusOr<Directory> find_zip64_directory(uint64_t end_offset) const;
  absl::Status read_directory(const Directory& directory);
  absl::StatusOr<Entry> read_entry(absl::string_view* rest) const;
  absl::Status build_index();

  absl::string_view bytes_;
  uint64_t directory_offset_ = 0;
  std::vector<Entry> entries_;
  std::vector<uint32_t> by_name_;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_ZIP_READER_H_
