#include "fullshard/io/safetensors_file.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/file_kind.h"
#include "fullshard/io/mapped_storage.h"
#include "fullshard/io/utf8.h"

namespace fullshard {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr size_t kSmallestEntryBytes = 50;
constexpr size_t kMaxDimensions = 64;
constexpr size_t kMaxMetadataEntries = 10000;

absl::Status damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("damaged safetensors file: ", what));
}

absl::Status damaged(absl::string_view name, absl::string_view what) {
  return damaged(absl::StrCat("tensor \"", name, "\" ", what));
}

absl::StatusOr<std::vector<int64_t>> read_shape(absl::string_view text) {
  JsonScanner json(text);
  std::vector<int64_t> shape;
  FS_RETURN_IF_ERROR(json.expect('['));
  if (json.accept(']')) return shape;
  do {
    FS_ASSIGN_OR_RETURN(const int64_t size, json.integer());
    if (shape.size() == kMaxDimensions) {
      return damaged(absl::StrCat("more than ", kMaxDimensions, " dimensions"));
    }
    shape.push_back(size);
  } while (json.accept(','));
  FS_RETURN_IF_ERROR(json.expect(']'));
  return shape;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::open(
    const std::string& path) {
  FS_ASSIGN_OR_RETURN(std::shared_ptr<MappedFile> mapped,
                      MappedFile::open(path));
  const FileKind kind = file_kind(mapped->bytes());
  if (kind != FileKind::kSafetensors && kind != FileKind::kUnknown) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": ", describe(kind), ", expected a safetensors file"));
  }
  std::unique_ptr<SafetensorsFile> file(
      new SafetensorsFile(path, std::move(mapped)));
  FS_RETURN_IF_ERROR(annotate(file->read_header(), path));
  return file;
}

absl::Status SafetensorsFile::read_header() {
  const absl::string_view bytes = file_->bytes();
  if (bytes.size() < kLengthBytes) {
    return damaged(absl::StrCat("cut short: ", bytes.size(),
                                " bytes, expected at least 8"));
  }
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) {
    length = length << 8 | static_cast<unsigned char>(bytes[i]);
  }
  if (length > kMaxHeaderBytes) {
    return damaged(absl::StrCat("its header has ", length,
                                " bytes, expected at most ", kMaxHeaderBytes));
  }
  if (length > bytes.size() - kLengthBytes) {
    return damaged(absl::StrCat("cut short: its header has ", length,
                                " bytes, but ", bytes.size() - kLengthBytes,
                                " follow"));
  }
  const absl::string_view header = bytes.substr(kLengthBytes, length);
  data_ = bytes.substr(kLengthBytes + length);
  if (header.empty() || header[0] != '{') {
    return damaged("its header does not start with '{'");
  }
  entries_.reserve(std::min<size_t>(
      static_cast<size_t>(std::count(header.begin(), header.end(), '{')),
      header.size() / kSmallestEntryBytes + 1));
  JsonScanner json(header);
  FS_RETURN_IF_ERROR(json.object([&](absl::string_view raw) -> absl::Status {
    if (raw == "__metadata__") return read_metadata(&json);
    FS_ASSIGN_OR_RETURN(const absl::string_view name, decode(raw));
    return read_entry(name, &json);
  }));
  FS_RETURN_IF_ERROR(json.end());
  FS_RETURN_IF_ERROR(build_index());
  return check_ranges();
}

absl::StatusOr<absl::string_view> SafetensorsFile::decode(
    absl::string_view raw) {
  if (raw.find('\\') == absl::string_view::npos && is_utf8(raw)) return raw;
  FS_ASSIGN_OR_RETURN(std::string name, decode_json_string(raw));
  decoded_.push_back(std::move(name));
  return absl::string_view(decoded_.back());
}

absl::Status SafetensorsFile::read_metadata(JsonScanner* json) {
  if (!metadata_.empty()) return damaged("__metadata__ appears twice");
  return json->object([&](absl::string_view raw) -> absl::Status {
    FS_ASSIGN_OR_RETURN(std::string key, decode_json_string(raw));
    FS_ASSIGN_OR_RETURN(const absl::string_view text, json->string());
    FS_ASSIGN_OR_RETURN(std::string value, decode_json_string(text));
    if (metadata_.size() == kMaxMetadataEntries) {
      return damaged(absl::StrCat("more than ", kMaxMetadataEntries,
                                  " entries of metadata"));
    }
    if (!metadata_.emplace(key, std::move(value)).second) {
      return damaged(absl::StrCat("metadata \"", key, "\" appears twice"));
    }
    return absl::OkStatus();
  });
}

absl::Status SafetensorsFile::read_entry(absl::string_view name,
                                         JsonScanner* json) {
  Entry entry{name, {}, nullptr, -1, -1};
  FS_RETURN_IF_ERROR(json->object([&](absl::string_view key) -> absl::Status {
    if (key == "dtype" && entry.dtype == nullptr) {
      FS_ASSIGN_OR_RETURN(const absl::string_view dtype, json->string());
      entry.dtype = find_safetensors_dtype(dtype);
      if (entry.dtype != nullptr) return absl::OkStatus();
      return damaged(name, absl::StrCat("has the unknown dtype \"",
                                        dtype.substr(0, 40), "\""));
    }
    if (key == "shape" && entry.shape.empty()) {
      FS_ASSIGN_OR_RETURN(entry.shape, json->skip_value());
      return absl::OkStatus();
    }
    if (key == "data_offsets" && entry.begin < 0) {
      FS_RETURN_IF_ERROR(json->expect('['));
      FS_ASSIGN_OR_RETURN(entry.begin, json->integer());
      FS_RETURN_IF_ERROR(json->expect(','));
      FS_ASSIGN_OR_RETURN(entry.end, json->integer());
      return json->expect(']');
    }
    return damaged(name, absl::StrCat("has the unexpected key \"",
                                      key.substr(0, 40), "\""));
  }));
  FS_RETURN_IF_ERROR(check_entry(entry));
  entries_.push_back(entry);
  return absl::OkStatus();
}

absl::Status SafetensorsFile::check_entry(const Entry& entry) const {
  if (entry.dtype == nullptr || entry.shape.empty() || entry.begin < 0) {
    return damaged(entry.name, "lacks dtype, shape or data_offsets");
  }
  const absl::StatusOr<std::vector<int64_t>> shape = read_shape(entry.shape);
  if (!shape.ok()) {
    return damaged(entry.name,
                   absl::StrCat("has a bad shape: ", shape.status().message()));
  }
  const std::optional<int64_t> size = safetensors_bytes(*entry.dtype, *shape);
  if (!size.has_value()) {
    return damaged(entry.name, "is too large or ends inside a byte");
  }
  if (entry.end < entry.begin || entry.end - entry.begin != *size) {
    return damaged(entry.name,
                   absl::StrCat("has data_offsets [", entry.begin, ", ",
                                entry.end, "], expected ", *size, " bytes"));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsFile::build_index() {
  by_name_.resize(entries_.size());
  std::iota(by_name_.begin(), by_name_.end(), 0);
  std::sort(by_name_.begin(), by_name_.end(), [&](uint32_t a, uint32_t b) {
    return entries_[a].name < entries_[b].name;
  });
  for (size_t i = 1; i < by_name_.size(); ++i) {
    const absl::string_view name = entries_[by_name_[i]].name;
    if (entries_[by_name_[i - 1]].name == name) {
      return damaged(name, "appears twice");
    }
  }
  return absl::OkStatus();
}

// The ranges, in order, cover the data without gaps and without overlap.
absl::Status SafetensorsFile::check_ranges() const {
  std::vector<uint32_t> order(entries_.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::make_pair(entries_[a].begin, entries_[a].end) <
           std::make_pair(entries_[b].begin, entries_[b].end);
  });
  int64_t expected = 0;
  for (const uint32_t i : order) {
    const Entry& entry = entries_[i];
    if (entry.begin != expected) {
      return damaged(entry.name,
                     absl::StrCat(entry.begin < expected
                                      ? "overlaps another: it starts at "
                                      : "follows a hole: it starts at ",
                                  entry.begin, ", expected ", expected));
    }
    expected = entry.end;
  }
  const auto size = static_cast<int64_t>(data_.size());
  if (expected == size) return absl::OkStatus();
  return damaged(absl::StrCat(expected > size ? "cut short" : "bytes left over",
                              ": ", size, " bytes of data, expected ",
                              expected));
}

std::vector<int64_t> SafetensorsFile::shape(size_t i) const {
  return *read_shape(entries_[i].shape);
}

absl::string_view SafetensorsFile::bytes(size_t i) const {
  const Entry& entry = entries_[i];
  return data_.substr(static_cast<size_t>(entry.begin),
                      static_cast<size_t>(entry.end - entry.begin));
}

std::optional<size_t> SafetensorsFile::find(absl::string_view name) const {
  const auto found =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](uint32_t i, absl::string_view wanted) {
                         return entries_[i].name < wanted;
                       });
  if (found == by_name_.end() || entries_[*found].name != name) {
    return std::nullopt;
  }
  return *found;
}

absl::StatusOr<at::Tensor> SafetensorsFile::tensor(size_t i) const {
  const SafetensorsDtype& dtype = this->dtype(i);
  const std::vector<int64_t> shape = this->shape(i);
  if (!dtype.scalar_type.has_value()) {
    return absl::UnimplementedError(absl::StrCat(path_, ": tensor \"", name(i),
                                                 "\" has dtype ", dtype.name,
                                                 ", which LibTorch lacks"));
  }
  if (dtype.bits < 8 && (shape.empty() || shape.back() % 2 != 0)) {
    return absl::UnimplementedError(absl::StrCat(
        path_, ": tensor \"", name(i),
        "\" of 4-bit floats has an odd last dimension, which LibTorch lacks"));
  }
  FS_RETURN_IF_ERROR(check_whole());
  const size_t alignment = c10::elementSize(*dtype.scalar_type);
  const std::vector<int64_t> sizes = shape_in_memory(dtype, shape);
  return tensor_view(mapped_storage(file_, bytes(i), alignment),
                     *dtype.scalar_type, sizes, contiguous_strides(sizes), 0);
}

}  // namespace fullshard
