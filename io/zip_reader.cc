#include "fullshard/io/zip_reader.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/crc32.h"
#include "fullshard/io/zip_format.h"

namespace fullshard {
namespace {

using namespace internal;  // NOLINT: the names of the record layout.

// Reads a little-endian integer. Requires: offset + sizeof(T) <= bytes.size().
template <class T>
T get(absl::string_view bytes, uint64_t offset) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    const auto byte = static_cast<unsigned char>(bytes[offset + i]);
    value = static_cast<T>(value | (static_cast<T>(byte) << (8 * i)));
  }
  return value;
}

// True if [offset, offset + size) lies in [0, limit).
bool fits(uint64_t offset, uint64_t size, uint64_t limit) {
  return offset <= limit && size <= limit - offset;
}

absl::Status damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("damaged ZIP archive: ", what));
}

// Replaces the fields that say "in 64 bits" by those of the ZIP64 extra field.
absl::Status apply_zip64(absl::string_view extra, uint64_t* size,
                         uint64_t* stored_size, uint64_t* header_offset) {
  std::vector<uint64_t*> wanted;
  for (uint64_t* field : {size, stored_size, header_offset}) {
    if (*field == kIn64Bits) wanted.push_back(field);
  }
  if (wanted.empty()) return absl::OkStatus();
  while (extra.size() >= 4) {
    const uint16_t id = get<uint16_t>(extra, 0);
    const uint16_t length = get<uint16_t>(extra, 2);
    if (!fits(4, length, extra.size())) break;
    if (id == kZip64ExtraId) {
      if (length < 8 * wanted.size()) break;
      for (size_t i = 0; i < wanted.size(); ++i) {
        *wanted[i] = get<uint64_t>(extra, 4 + 8 * i);
      }
      return absl::OkStatus();
    }
    extra.remove_prefix(4 + size_t{length});
  }
  return damaged("an entry lacks its ZIP64 sizes");
}

}  // namespace

absl::StatusOr<ZipReader> ZipReader::open(absl::string_view bytes) {
  ZipReader reader(bytes);
  FS_ASSIGN_OR_RETURN(const Directory directory, reader.find_directory());
  FS_RETURN_IF_ERROR(reader.read_directory(directory));
  return reader;
}

absl::StatusOr<ZipReader::Directory> ZipReader::find_directory() const {
  if (bytes_.size() < kEndBytes) {
    return damaged("cut short, no end record");
  }
  const uint64_t last = bytes_.size() - kEndBytes;
  const uint64_t first = last - std::min<uint64_t>(last, 0xffff);
  uint64_t end = last;
  while (get<uint32_t>(bytes_, end) != kEndSignature ||
         get<uint16_t>(bytes_, end + 20) != last - end) {
    if (end == first) return damaged("cut short, no end record");
    --end;
  }
  const Directory directory{get<uint32_t>(bytes_, end + 16),
                            get<uint32_t>(bytes_, end + 12),
                            get<uint16_t>(bytes_, end + 10)};
  const bool has_locator =
      end >= kZip64LocatorBytes &&
      get<uint32_t>(bytes_, end - kZip64LocatorBytes) == kZip64LocatorSignature;
  if (has_locator) return find_zip64_directory(end);
  if (!fits(directory.offset, directory.num_bytes, end)) {
    return damaged("the central directory reaches out of the file");
  }
  return directory;
}

absl::StatusOr<ZipReader::Directory> ZipReader::find_zip64_directory(
    uint64_t end_offset) const {
  const uint64_t locator = end_offset - kZip64LocatorBytes;
  const uint64_t record = get<uint64_t>(bytes_, locator + 8);
  if (!fits(record, kZip64EndBytes, locator) ||
      get<uint32_t>(bytes_, record) != kZip64EndSignature) {
    return damaged("the ZIP64 end record is missing");
  }
  const Directory directory{get<uint64_t>(bytes_, record + 48),
                            get<uint64_t>(bytes_, record + 40),
                            get<uint64_t>(bytes_, record + 32)};
  if (!fits(directory.offset, directory.num_bytes, record)) {
    return damaged("the central directory reaches out of the file");
  }
  return directory;
}

absl::Status ZipReader::read_directory(const Directory& directory) {
  if (directory.num_entries > directory.num_bytes / kDirectoryEntryBytes) {
    return damaged("more entries than the central directory can hold");
  }
  directory_offset_ = directory.offset;
  absl::string_view rest = bytes_.substr(directory.offset, directory.num_bytes);
  entries_.reserve(directory.num_entries);
  for (uint64_t i = 0; i < directory.num_entries; ++i) {
    FS_ASSIGN_OR_RETURN(const Entry entry, read_entry(&rest));
    entries_.push_back(entry);
  }
  if (!rest.empty()) return damaged("bytes left in the central directory");
  return build_index();
}

absl::Status ZipReader::build_index() {
  by_name_.resize(entries_.size());
  std::iota(by_name_.begin(), by_name_.end(), 0);
  std::sort(by_name_.begin(), by_name_.end(), [&](uint32_t a, uint32_t b) {
    return entries_[a].name < entries_[b].name;
  });
  for (size_t i = 1; i < by_name_.size(); ++i) {
    const absl::string_view name = entries_[by_name_[i]].name;
    if (entries_[by_name_[i - 1]].name == name) {
      return damaged(absl::StrCat("two entries named \"", name, "\""));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ZipReader::Entry> ZipReader::read_entry(
    absl::string_view* rest) const {
  if (rest->size() < kDirectoryEntryBytes ||
      get<uint32_t>(*rest, 0) != kDirectoryEntrySignature) {
    return damaged("a central directory entry is missing");
  }
  const uint16_t flags = get<uint16_t>(*rest, 8);
  const uint16_t method = get<uint16_t>(*rest, 10);
  const uint64_t name_bytes = get<uint16_t>(*rest, 28);
  const uint64_t extra_bytes = get<uint16_t>(*rest, 30);
  const uint64_t comment_bytes = get<uint16_t>(*rest, 32);
  const uint64_t total =
      kDirectoryEntryBytes + name_bytes + extra_bytes + comment_bytes;
  if (total > rest->size()) {
    return damaged("a central directory entry is cut short");
  }
  Entry entry{rest->substr(kDirectoryEntryBytes, name_bytes),
              get<uint32_t>(*rest, 42), get<uint32_t>(*rest, 24),
              get<uint32_t>(*rest, 16),
              method == 0 && (flags & kFlagEncrypted) == 0};
  uint64_t stored_size = get<uint32_t>(*rest, 20);
  FS_RETURN_IF_ERROR(
      apply_zip64(rest->substr(kDirectoryEntryBytes + name_bytes, extra_bytes),
                  &entry.size, &stored_size, &entry.header_offset));
  rest->remove_prefix(total);
  if (entry.is_stored && stored_size != entry.size) {
    return damaged(
        absl::StrCat("entry \"", entry.name, "\" has two different sizes"));
  }
  return entry;
}

const ZipReader::Entry* ZipReader::find(absl::string_view name) const {
  const auto found =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](uint32_t i, absl::string_view wanted) {
                         return entries_[i].name < wanted;
                       });
  if (found == by_name_.end() || entries_[*found].name != name) return nullptr;
  return &entries_[*found];
}

absl::StatusOr<absl::string_view> ZipReader::data(const Entry& entry) const {
  if (!entry.is_stored) {
    return absl::UnimplementedError(
        absl::StrCat("ZIP entry \"", entry.name,
                     "\" is compressed or encrypted, expected stored bytes"));
  }
  const uint64_t header = entry.header_offset;
  if (!fits(header, kLocalHeaderBytes, directory_offset_) ||
      get<uint32_t>(bytes_, header) != kLocalHeaderSignature) {
    return damaged(
        absl::StrCat("no local header for entry \"", entry.name, "\""));
  }
  const uint64_t name_bytes = get<uint16_t>(bytes_, header + 26);
  const uint64_t extra_bytes = get<uint16_t>(bytes_, header + 28);
  const uint64_t start = header + kLocalHeaderBytes + name_bytes + extra_bytes;
  if (!fits(start, entry.size, directory_offset_)) {
    return damaged(
        absl::StrCat("entry \"", entry.name, "\" reaches out of the file"));
  }
  if (bytes_.substr(header + kLocalHeaderBytes, name_bytes) != entry.name) {
    return damaged(absl::StrCat("the local header of entry \"", entry.name,
                                "\" has another name"));
  }
  return bytes_.substr(start, entry.size);
}

absl::Status ZipReader::verify(const Entry& entry) const {
  FS_ASSIGN_OR_RETURN(const absl::string_view bytes, data(entry));
  if (crc32(0, bytes.data(), bytes.size()) != entry.crc) {
    return damaged(
        absl::StrCat("wrong checksum of entry \"", entry.name, "\""));
  }
  return absl::OkStatus();
}

}  // namespace fullshard
