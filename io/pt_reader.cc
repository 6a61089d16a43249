#include "fullshard/io/pt_reader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "fullshard/core/status.h"
#include "fullshard/io/file_kind.h"
#include "fullshard/io/legacy_pt.h"
#include "fullshard/io/mapped_storage.h"
#include "fullshard/io/pickle_reader.h"

namespace fullshard {
namespace {

using Bytes = absl::string_view;

constexpr size_t kElementAlignment = 16;

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

absl::Status check_byte_order(const ZipReader& zip, const std::string& prefix) {
  FS_ASSIGN_OR_RETURN(const std::string order,
                      read_entry(zip, prefix + "byteorder"));
  if (order.empty() || order == "little") return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("byte order \"", order, "\", expected \"little\""));
}

}  // namespace

absl::StatusOr<std::unique_ptr<PtReader>> PtReader::open(
    const std::string& path) {
  FS_ASSIGN_OR_RETURN(std::shared_ptr<MappedFile> file, MappedFile::open(path));
  const FileKind kind = file_kind(file->bytes());
  std::unique_ptr<PtReader> reader(new PtReader(path, std::move(file)));
  switch (kind) {
    case FileKind::kZip:
      FS_RETURN_IF_ERROR(annotate(reader->read_archive(), path));
      return reader;
    case FileKind::kLegacyPt:
      FS_RETURN_IF_ERROR(annotate(reader->read_legacy(), path));
      return reader;
    case FileKind::kCutZip:
      return absl::DataLossError(absl::StrCat(path, ": ", describe(kind)));
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": ", describe(kind),
          kind == FileKind::kSafetensors ? ", expected a .pt file" : ""));
  }
}

PtReader::PtReader(std::string path, std::shared_ptr<MappedFile> file)
    : path_(std::move(path)), file_(std::move(file)) {}

absl::Status PtReader::read_archive() {
  FS_ASSIGN_OR_RETURN(zip_, ZipReader::open(file_->bytes()));
  FS_ASSIGN_OR_RETURN(prefix_, find_prefix(*zip_));
  FS_RETURN_IF_ERROR(check_byte_order(*zip_, prefix_));
  FS_ASSIGN_OR_RETURN(std::string bytes,
                      read_entry(*zip_, prefix_ + "data.pkl"));
  const auto owner = std::make_shared<const std::string>(std::move(bytes));
  FS_ASSIGN_OR_RETURN(Pickle pickle,
                      read_pickle_prefix(*owner, owner, file_->size()));
  root_ = std::move(pickle.root);
  return absl::OkStatus();
}

absl::Status PtReader::read_legacy() {
  FS_ASSIGN_OR_RETURN(LegacyPt legacy, read_legacy_pt(file_));
  root_ = std::move(legacy.root);
  legacy_storages_ = std::move(legacy.storages);
  return absl::OkStatus();
}

absl::StatusOr<absl::string_view> PtReader::storage_bytes(
    const std::string& key) const {
  if (!zip_.has_value()) {
    const auto found = legacy_storages_.find(key);
    if (found != legacy_storages_.end()) return found->second;
    return absl::DataLossError(
        absl::StrCat(path_, ": storage \"", key, "\" is missing"));
  }
  const std::string name = absl::StrCat(prefix_, "data/", key);
  const ZipReader::Entry* const entry = zip_->find(name);
  if (entry == nullptr) {
    return absl::DataLossError(
        absl::StrCat(path_, ": entry \"", name, "\" is missing"));
  }
  const absl::StatusOr<Bytes> bytes = zip_->data(*entry);
  if (!bytes.ok()) return annotate(bytes.status(), path_);
  return *bytes;
}

absl::StatusOr<c10::Storage> PtReader::storage(const PickledTensor& tensor) {
  const std::string& key = tensor.storage_key;
  if (const auto found = storages_.find(key); found != storages_.end()) {
    c10::Storage used(found->second.lock());
    if (used && static_cast<int64_t>(used.nbytes()) == tensor.storage_bytes) {
      return used;
    }
  }
  FS_ASSIGN_OR_RETURN(const Bytes bytes, storage_bytes(key));
  const auto size = static_cast<size_t>(tensor.storage_bytes);
  if (bytes.size() < size) {
    return absl::DataLossError(absl::StrCat(path_, ": storage \"", key,
                                            "\" has ", bytes.size(),
                                            " bytes, expected ", size));
  }
  c10::Storage storage = mapped_storage(
      file_, bytes.substr(0, size),
      zip_.has_value() ? kElementAlignment : c10::elementSize(tensor.dtype));
  storages_.insert_or_assign(key, storage.getWeakStorageImpl());
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
  if (!zip_.has_value()) return absl::OkStatus();
  for (const ZipReader::Entry& entry : zip_->entries()) {
    FS_RETURN_IF_ERROR(annotate(zip_->verify(entry), path_));
  }
  return absl::OkStatus();
}

}  // namespace fullshard
