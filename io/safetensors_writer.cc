#include "fullshard/io/safetensors_writer.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "fullshard/core/status.h"
#include "fullshard/io/json_scanner.h"
#include "fullshard/io/safetensors_file.h"
#include "fullshard/io/utf8.h"

namespace fullshard {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr size_t kHeaderAlignment = 8;

std::string length_prefix(uint64_t length) {
  std::string out;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    out.push_back(static_cast<char>(length >> (8 * i)));
  }
  return out;
}

std::string header_entry(const SafetensorsTensor& tensor, int64_t begin,
                         int64_t size) {
  return absl::StrCat(json_string(tensor.name), R"(:{"dtype":")",
                      tensor.dtype->name, R"(","shape":[)",
                      absl::StrJoin(tensor.shape, ","), R"(],"data_offsets":[)",
                      begin, ",", begin + size, "]}");
}

absl::StatusOr<std::string> metadata_entry(
    const std::map<std::string, std::string>& metadata) {
  std::vector<std::string> entries;
  for (const auto& [key, value] : metadata) {
    if (!is_utf8(key) || !is_utf8(value)) {
      return absl::InvalidArgumentError(
          absl::StrCat("metadata \"", key, "\" is not UTF-8"));
    }
    entries.push_back(absl::StrCat(json_string(key), ":", json_string(value)));
  }
  return absl::StrCat("\"__metadata__\":{", absl::StrJoin(entries, ","), "}");
}

}  // namespace

absl::StatusOr<SafetensorsTensor> describe_safetensors(
    const std::string& name, c10::ScalarType dtype,
    std::vector<int64_t> sizes) {
  const SafetensorsDtype* const known = find_safetensors_dtype(dtype);
  if (known == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", name, "\" has dtype ", c10::toString(dtype),
                     ", which the safetensors format lacks"));
  }
  return SafetensorsTensor{name, known,
                           shape_in_file(*known, std::move(sizes))};
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::create(
    const std::string& path, const std::vector<SafetensorsTensor>& tensors,
    const SafetensorsWriterOptions& options) {
  FileSystem& file_system = options.file_system == nullptr
                                ? FileSystem::posix()
                                : *options.file_system;
  FS_ASSIGN_OR_RETURN(std::unique_ptr<AtomicFile> file,
                      AtomicFile::create(path, file_system));
  std::unique_ptr<SafetensorsWriter> writer(
      new SafetensorsWriter(std::move(file)));
  FS_RETURN_IF_ERROR(writer->write_header(tensors, options.metadata));
  return writer;
}

absl::Status SafetensorsWriter::invalid(const std::string& name,
                                        absl::string_view what) const {
  return absl::InvalidArgumentError(
      absl::StrCat(path(), ": tensor \"", name, "\" ", what));
}

absl::Status SafetensorsWriter::write_header(
    const std::vector<SafetensorsTensor>& tensors,
    const std::map<std::string, std::string>& metadata) {
  for (const SafetensorsTensor& tensor : tensors) {
    const auto size = safetensors_bytes(*tensor.dtype, tensor.shape);
    if (!is_utf8(tensor.name)) return invalid(tensor.name, "is not UTF-8");
    if (tensor.name == "__metadata__") {
      return invalid(tensor.name, "has a reserved name");
    }
    if (!size.has_value()) {
      return invalid(tensor.name, "is too large or ends inside a byte");
    }
    places_.push_back({tensor, 0, *size});
  }
  std::stable_sort(places_.begin(), places_.end(),
                   [](const Place& a, const Place& b) {
                     return a.tensor.dtype->bits > b.tensor.dtype->bits;
                   });
  std::vector<std::string> entries;
  if (!metadata.empty()) {
    FS_ASSIGN_OR_RETURN(std::string entry, metadata_entry(metadata));
    entries.push_back(std::move(entry));
  }
  int64_t begin = 0;
  for (Place& place : places_) {
    const std::string& name = place.tensor.name;
    if (!index_.emplace(name, index_.size()).second) {
      return invalid(name, "appears twice");
    }
    place.begin = begin;
    entries.push_back(header_entry(place.tensor, begin, place.size));
    if (__builtin_add_overflow(begin, place.size, &begin)) {
      return invalid(name, "ends beyond 2^63 bytes");
    }
  }
  num_missing_ = places_.size();
  std::string header = absl::StrCat("{", absl::StrJoin(entries, ","), "}");
  const size_t tail = header.size() % kHeaderAlignment;
  if (tail != 0) header.append(kHeaderAlignment - tail, ' ');
  if (header.size() > SafetensorsFile::kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        path(), ": the header of ", places_.size(), " tensors has ",
        header.size(), " bytes, the format ends at ",
        SafetensorsFile::kMaxHeaderBytes));
  }
  const std::string start = length_prefix(header.size()) + header;
  for (Place& place : places_) {
    place.begin += static_cast<int64_t>(start.size());
  }
  return file_->sink().append(start.data(), start.size());
}

absl::StatusOr<SafetensorsWriter::Place*> SafetensorsWriter::find(
    const std::string& name) {
  const auto found = index_.find(name);
  if (found == index_.end()) return invalid(name, "was not announced");
  Place* const place = &places_[found->second];
  if (place->is_written) return invalid(name, "comes twice");
  return place;
}

absl::Status SafetensorsWriter::write(Place* place, absl::string_view bytes) {
  FS_RETURN_IF_ERROR(file_->sink().seek(place->begin));
  FS_RETURN_IF_ERROR(file_->sink().append(bytes.data(), bytes.size()));
  note_written(place);
  return absl::OkStatus();
}

void SafetensorsWriter::note_written(Place* place) {
  place->is_written = true;
  --num_missing_;
}

absl::StatusOr<int64_t> SafetensorsWriter::reserve(const std::string& name) {
  FS_ASSIGN_OR_RETURN(Place* const place, find(name));
  note_written(place);
  return place->begin;
}

absl::Status SafetensorsWriter::bytes(const std::string& name,
                                      absl::string_view bytes) {
  FS_ASSIGN_OR_RETURN(Place* const place, find(name));
  if (static_cast<int64_t>(bytes.size()) != place->size) {
    return invalid(name, absl::StrCat("has ", bytes.size(), " bytes, expected ",
                                      place->size));
  }
  return write(place, bytes);
}

absl::Status SafetensorsWriter::tensor(const std::string& name,
                                       const at::Tensor& tensor) {
  FS_ASSIGN_OR_RETURN(Place* const place, find(name));
  if (!tensor.defined() || tensor.layout() != c10::kStrided ||
      tensor.is_meta()) {
    return invalid(name, "has no dense elements in memory");
  }
  const SafetensorsTensor& expected = place->tensor;
  if (expected.dtype->scalar_type != tensor.scalar_type() ||
      expected.shape != shape_in_file(*expected.dtype, tensor.sizes().vec())) {
    return invalid(
        name, absl::StrCat("is ", c10::toString(tensor.scalar_type()), " [",
                           absl::StrJoin(tensor.sizes(), ", "),
                           "], announced as ", expected.dtype->name, " [",
                           absl::StrJoin(expected.shape, ", "), "]"));
  }
  try {
    at::Tensor plain = tensor.detach();
    if (plain.is_conj()) plain = plain.resolve_conj();
    if (plain.is_neg()) plain = plain.resolve_neg();
    if (!plain.is_cpu()) plain = plain.cpu();
    plain = plain.contiguous();
    return write(place, {static_cast<const char*>(plain.const_data_ptr()),
                         plain.nbytes()});
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat(
        path(), ": tensor \"", name, "\" cannot be read: ", error.what()));
  }
}

absl::Status SafetensorsWriter::commit() {
  for (const Place& place : places_) {
    if (!place.is_written) {
      return absl::FailedPreconditionError(
          absl::StrCat(path(), ": tensor \"", place.tensor.name,
                       "\" did not come (", num_missing_, " missing)"));
    }
  }
  return file_->commit();
}

}  // namespace fullshard
