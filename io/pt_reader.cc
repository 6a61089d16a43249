#include "fullshard/io/pt_reader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "fullshard/core/status.h"
#include "fullshard/io/file_kind.h"
#include "fullshard/io/mapped_storage.h"
#include "fullshard/io/pickle_reader.h"

namespace fullshard {
namespace {

using Bytes = absl::string_view;

constexpr size_t kElementAlignment = 16;

absl::Status recognise(Bytes bytes) {
  const FileKind kind = file_kind(bytes);
  switch (kind) {
    case FileKind::kZip:
      return absl::OkStatus();
    case FileKind::kCutZip:
      return absl::DataLossError(describe(kind));
    case FileKind::kSafetensors:
      return absl::InvalidArgumentError(
          "a safetensors file, expected a .pt file");
    default:
      return absl::InvalidArgumentError(describe(kind));
  }
}

// "archive/" of "archive/data.pkl".
absl::StatusOr<std::string> find_prefix(const ZipReader& zip) {
  bool has_pickle = false;
  std::string prefix;
  for (const ZipReader::Entry& entry : zip.entries()) {
    Bytes name = entry.name;
    if (absl::EndsWith(name, "/constants.pkl")) {
      return absl::UnimplementedError(
          "a TorchScript archive, expected a checkpoint of torch.save");
    }
    if (absl::ConsumeSuffix(&name, "data.pkl") &&
        std::count(name.begin(), name.end(), '/') == 1 && name.back() == '/') {
      has_pickle = true;
      prefix = std::string(name);
    }
  }
  if (has_pickle) return prefix;
  return absl::InvalidArgumentError(
      "a ZIP archive without data.pkl, not a checkpoint");
}

absl::StatusOr<std::string> read_entry(const ZipReader& zip,
                                       const std::string& name) {
  const ZipReader::Entry* const entry = zip.find(name);
  if (entry == nullptr) return std::string();
  FS_RETURN_IF_ERROR(zip.verify(*entry));
  FS_ASSIGN_OR_RETURN(const Bytes bytes, zip.data(*entry));
  return std::string(bytes);
}

absl::StatusOr<PtValue> read_root(const ZipReader& zip,
                                  const std::string& prefix) {
  FS_ASSIGN_OR_RETURN(const std::string order,
                      read_entry(zip, prefix + "byteorder"));
  if (!order.empty() && order != "little") {
    return absl::UnimplementedError(
        absl::StrCat("byte order \"", order, "\", expected \"little\""));
  }
  FS_ASSIGN_OR_RETURN(std::string pickle, read_entry(zip, prefix + "data.pkl"));
  return read_pickle(std::move(pickle));
}

}  // namespace

absl::StatusOr<std::unique_ptr<PtReader>> PtReader::open(
    const std::string& path) {
  FS_ASSIGN_OR_RETURN(std::shared_ptr<MappedFile> file, MappedFile::open(path));
  FS_RETURN_IF_ERROR(annotate(recognise(file->bytes()), path));
  absl::StatusOr<ZipReader> zip = ZipReader::open(file->bytes());
  if (!zip.ok()) return annotate(zip.status(), path);
  absl::StatusOr<std::string> prefix = find_prefix(*zip);
  if (!prefix.ok()) return annotate(prefix.status(), path);
  absl::StatusOr<PtValue> root = read_root(*zip, *prefix);
  if (!root.ok()) return annotate(root.status(), path);
  return std::unique_ptr<PtReader>(
      new PtReader(path, std::move(file), *std::move(zip), *std::move(prefix),
                   *std::move(root)));
}

PtReader::PtReader(std::string path, std::shared_ptr<MappedFile> file,
                   ZipReader zip, std::string prefix, PtValue root)
    : path_(std::move(path)),
      file_(std::move(file)),
      zip_(std::move(zip)),
      prefix_(std::move(prefix)),
      root_(std::move(root)) {}

absl::StatusOr<c10::Storage> PtReader::storage(const PickledTensor& tensor) {
  if (const auto found = storages_.find(tensor.storage_key);
      found != storages_.end()) {
    if (static_cast<int64_t>(found->second.nbytes()) == tensor.storage_bytes) {
      return found->second;
    }
  }
  const std::string name = absl::StrCat(prefix_, "data/", tensor.storage_key);
  const ZipReader::Entry* const entry = zip_.find(name);
  if (entry == nullptr) {
    return absl::DataLossError(
        absl::StrCat(path_, ": entry \"", name, "\" is missing"));
  }
  const absl::StatusOr<Bytes> bytes = zip_.data(*entry);
  if (!bytes.ok()) return annotate(bytes.status(), path_);
  const auto size = static_cast<size_t>(tensor.storage_bytes);
  if (bytes->size() < size) {
    return absl::DataLossError(absl::StrCat(path_, ": entry \"", name,
                                            "\" has ", bytes->size(),
                                            " bytes, expected ", size));
  }
  c10::Storage storage =
      mapped_storage(file_, bytes->substr(0, size), kElementAlignment);
  storages_[tensor.storage_key] = storage;
  return storage;
}

absl::StatusOr<at::Tensor> PtReader::tensor(const PtValue& value) {
  FS_RETURN_IF_ERROR(file_->check_whole());
  const PickledTensor pickled = value.as_tensor();
  FS_ASSIGN_OR_RETURN(c10::Storage storage, this->storage(pickled));
  return tensor_view(std::move(storage), pickled.dtype, pickled.sizes,
                     pickled.strides, pickled.storage_offset);
}

absl::Status PtReader::verify() const {
  for (const ZipReader::Entry& entry : zip_.entries()) {
    FS_RETURN_IF_ERROR(annotate(zip_.verify(entry), path_));
  }
  return absl::OkStatus();
}

}  // namespace fullshard
