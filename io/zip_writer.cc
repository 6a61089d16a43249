#include "fullshard/io/zip_writer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/crc32.h"
#include "fullshard/io/zip_format.h"

namespace fullshard {
namespace {

using namespace internal;  // NOLINT: the names of the record layout.

constexpr uint16_t kVersion = 20;
constexpr uint16_t kVersionZip64 = 45;
constexpr uint16_t kFlags = kFlagDataDescriptor | kFlagUtf8;

template <class T>
void put(std::string* out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out->push_back(static_cast<char>((value >> (8 * i)) & 0xff));
  }
}

}  // namespace

ZipWriter::ZipWriter(ByteSink& sink, uint64_t zip64_limit)
    : sink_(sink), zip64_limit_(zip64_limit) {}

absl::Status ZipWriter::write(const std::string& bytes) {
  offset_ += bytes.size();
  return sink_.append(bytes.data(), bytes.size());
}

absl::Status ZipWriter::write_data(const char* data, size_t size, Entry* entry,
                                   std::vector<uint32_t>* piece_crcs) {
  offset_ += size;
  while (size > 0) {
    const size_t piece = std::min(size, kPieceBytes);
    const uint32_t crc = crc32(0, data, piece);
    entry->crc = crc32_combine(entry->crc, crc, static_cast<int64_t>(piece));
    if (piece_crcs != nullptr) piece_crcs->push_back(crc);
    // It is still in the cache.
    FS_RETURN_IF_ERROR(sink_.append(data, piece));
    data += piece;
    size -= piece;
  }
  return absl::OkStatus();
}

absl::StatusOr<ZipWriter::Entry> ZipWriter::begin_entry(absl::string_view name,
                                                        uint64_t size) {
  if (name.empty() || name.size() > 0xffff) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a ZIP entry name has ", name.size(), " bytes, expected 1 to 65535"));
  }
  Entry entry{std::string(name), offset_, size, 0};
  FS_RETURN_IF_ERROR(write(local_header(name, size)));
  last_data_offset_ = num_bytes();
  return entry;
}

absl::Status ZipWriter::add(absl::string_view name, const void* data,
                            size_t size, std::vector<uint32_t>* piece_crcs) {
  FS_ASSIGN_OR_RETURN(Entry entry, begin_entry(name, size));
  FS_RETURN_IF_ERROR(
      write_data(static_cast<const char*>(data), size, &entry, piece_crcs));
  FS_RETURN_IF_ERROR(write(data_descriptor(entry)));
  entries_.push_back(std::move(entry));
  return absl::OkStatus();
}

absl::StatusOr<size_t> ZipWriter::reserve(absl::string_view name,
                                          uint64_t size) {
  FS_ASSIGN_OR_RETURN(Entry entry, begin_entry(name, size));
  entry.complete = false;
  entry.descriptor_offset = offset_ + size;
  offset_ = entry.descriptor_offset + data_descriptor(entry).size();
  FS_RETURN_IF_ERROR(sink_.seek(num_bytes()));
  entries_.push_back(std::move(entry));
  return entries_.size() - 1;
}

absl::Status ZipWriter::complete(size_t entry, uint32_t crc) {
  Entry& reserved = entries_.at(entry);
  reserved.crc = crc;
  reserved.complete = true;
  const std::string descriptor = data_descriptor(reserved);
  FS_RETURN_IF_ERROR(
      sink_.seek(static_cast<int64_t>(reserved.descriptor_offset)));
  FS_RETURN_IF_ERROR(sink_.append(descriptor.data(), descriptor.size()));
  return sink_.seek(num_bytes());
}

std::string ZipWriter::local_header(absl::string_view name,
                                    uint64_t size) const {
  const bool zip64 = is_zip64(size);
  std::string extra;
  if (zip64) {
    put<uint16_t>(&extra, kZip64ExtraId);
    put<uint16_t>(&extra, 16);
    put<uint64_t>(&extra, size);
    put<uint64_t>(&extra, size);
  }
  const uint64_t unpadded =
      offset_ + kLocalHeaderBytes + name.size() + extra.size() + 4;
  const uint64_t padding = (kAlignment - unpadded % kAlignment) % kAlignment;
  put<uint16_t>(&extra, kPaddingExtraId);
  put<uint16_t>(&extra, static_cast<uint16_t>(padding));
  extra.append(padding, 'Z');

  std::string header;
  put<uint32_t>(&header, kLocalHeaderSignature);
  put<uint16_t>(&header, zip64 ? kVersionZip64 : kVersion);
  put<uint16_t>(&header, kFlags);
  put<uint16_t>(&header, 0);  // stored
  put<uint32_t>(&header, 0);  // time and date
  put<uint32_t>(&header, 0);  // the checksum is in the data descriptor
  put<uint32_t>(&header, zip64 ? kIn64Bits : 0);
  put<uint32_t>(&header, zip64 ? kIn64Bits : 0);
  put<uint16_t>(&header, static_cast<uint16_t>(name.size()));
  put<uint16_t>(&header, static_cast<uint16_t>(extra.size()));
  return absl::StrCat(header, name, extra);
}

std::string ZipWriter::data_descriptor(const Entry& entry) const {
  std::string out;
  put<uint32_t>(&out, kDataDescriptorSignature);
  put<uint32_t>(&out, entry.crc);
  for (int i = 0; i < 2; ++i) {
    if (is_zip64(entry.size)) {
      put<uint64_t>(&out, entry.size);
    } else {
      put<uint32_t>(&out, static_cast<uint32_t>(entry.size));
    }
  }
  return out;
}

void ZipWriter::append_directory_entry(const Entry& entry,
                                       std::string* out) const {
  const bool large_size = is_zip64(entry.size);
  const bool large_offset = is_zip64(entry.header_offset);
  std::string extra;
  if (large_size || large_offset) {
    put<uint16_t>(&extra, kZip64ExtraId);
    put<uint16_t>(&extra, (large_size ? 16 : 0) + (large_offset ? 8 : 0));
    if (large_size) put<uint64_t>(&extra, entry.size);
    if (large_size) put<uint64_t>(&extra, entry.size);
    if (large_offset) put<uint64_t>(&extra, entry.header_offset);
  }
  const uint16_t version = extra.empty() ? kVersion : kVersionZip64;
  const auto low32 = [](bool in64, uint64_t value) {
    return in64 ? kIn64Bits : static_cast<uint32_t>(value);
  };
  put<uint32_t>(out, kDirectoryEntrySignature);
  put<uint16_t>(out, version);
  put<uint16_t>(out, version);
  put<uint16_t>(out, kFlags);
  put<uint16_t>(out, 0);  // stored
  put<uint32_t>(out, 0);  // time and date
  put<uint32_t>(out, entry.crc);
  put<uint32_t>(out, low32(large_size, entry.size));
  put<uint32_t>(out, low32(large_size, entry.size));
  put<uint16_t>(out, static_cast<uint16_t>(entry.name.size()));
  put<uint16_t>(out, static_cast<uint16_t>(extra.size()));
  put<uint16_t>(out, 0);  // comment
  put<uint16_t>(out, 0);  // disk
  put<uint16_t>(out, 0);  // internal attributes
  put<uint32_t>(out, 0);  // external attributes
  put<uint32_t>(out, low32(large_offset, entry.header_offset));
  absl::StrAppend(out, entry.name, extra);
}

absl::Status ZipWriter::finish() {
  for (const Entry& entry : entries_) {
    if (entry.complete) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("the data of ZIP entry ", entry.name, " did not come"));
  }
  const uint64_t directory_offset = offset_;
  std::string out;
  for (const Entry& entry : entries_) append_directory_entry(entry, &out);
  const uint64_t directory_bytes = out.size();
  const uint64_t count = entries_.size();

  if (count >= kIn64Bits16 || is_zip64(directory_offset) ||
      is_zip64(directory_bytes)) {
    const uint64_t zip64_end_offset = directory_offset + directory_bytes;
    put<uint32_t>(&out, kZip64EndSignature);
    put<uint64_t>(&out, kZip64EndBytes - 12);
    put<uint16_t>(&out, kVersionZip64);
    put<uint16_t>(&out, kVersionZip64);
    put<uint32_t>(&out, 0);  // disk
    put<uint32_t>(&out, 0);  // disk of the directory
    put<uint64_t>(&out, count);
    put<uint64_t>(&out, count);
    put<uint64_t>(&out, directory_bytes);
    put<uint64_t>(&out, directory_offset);
    put<uint32_t>(&out, kZip64LocatorSignature);
    put<uint32_t>(&out, 0);  // disk
    put<uint64_t>(&out, zip64_end_offset);
    put<uint32_t>(&out, 1);  // disks
  }
  const uint16_t count16 =
      static_cast<uint16_t>(std::min<uint64_t>(count, kIn64Bits16));
  const auto low32 = [this](uint64_t value) {
    return is_zip64(value) ? kIn64Bits : static_cast<uint32_t>(value);
  };
  put<uint32_t>(&out, kEndSignature);
  put<uint16_t>(&out, 0);  // disk
  put<uint16_t>(&out, 0);  // disk of the directory
  put<uint16_t>(&out, count16);
  put<uint16_t>(&out, count16);
  put<uint32_t>(&out, low32(directory_bytes));
  put<uint32_t>(&out, low32(directory_offset));
  put<uint16_t>(&out, 0);  // comment
  return write(out);
}

}  // namespace fullshard
