#include "fullshard/io/pt_reader.h"

#include <ATen/core/TensorBase.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "fullshard/core/status.h"
#include "fullshard/io/pickle_reader.h"

namespace fullshard {
namespace {

using Bytes = absl::string_view;

// The magic number that torch.save pickled before PyTorch 1.6.
constexpr Bytes kLegacyMagic("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19",
                             12);
constexpr Bytes kZipMagic("PK\x03\x04", 4);
constexpr Bytes kEmptyZipMagic("PK\x05\x06", 4);
constexpr size_t kElementAlignment = 16;

absl::Status recognise(Bytes bytes) {
  const Bytes start = bytes.substr(0, 4096);
  if (absl::StartsWith(start, kZipMagic)) return absl::OkStatus();
  const std::string text = absl::AsciiStrToLower(
      absl::StripLeadingAsciiWhitespace(start.substr(0, 256)));
  if (absl::StartsWith(text, "version https://git-lfs")) {
    return absl::InvalidArgumentError(
        "a Git-LFS pointer, not the checkpoint itself; fetch it with git lfs");
  }
  if (absl::StartsWith(text, "<!doctype html") ||
      absl::StartsWith(text, "<html")) {
    return absl::InvalidArgumentError("a web page (HTML), not a checkpoint");
  }
  if (start.size() > 14 && start.substr(2, 12) == kLegacyMagic) {
    return absl::UnimplementedError(
        "a checkpoint in the legacy format (before PyTorch 1.6); load it in "
        "Python and save it again");
  }
  if (start.size() > 9 && start[8] == '{' &&
      start.substr(5, 3) == Bytes("\0\0\0", 3)) {
    return absl::InvalidArgumentError(
        "a safetensors file, expected a .pt file");
  }
  if (start.size() > 262 && start.substr(257, 5) == "ustar") {
    return absl::InvalidArgumentError("a tar archive, not a checkpoint");
  }
  if (absl::StartsWith(kZipMagic, start)) {
    return absl::DataLossError("cut short: a few bytes of a checkpoint");
  }
  if (absl::StartsWith(start, kEmptyZipMagic)) {
    return absl::InvalidArgumentError("an empty ZIP archive");
  }
  return absl::InvalidArgumentError(
      "not a checkpoint: it does not start like a ZIP archive");
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

void release_mapping(void* context) {
  delete static_cast<std::shared_ptr<MappedFile>*>(context);
}

c10::DataPtr copy_aligned(Bytes bytes) {
  c10::DataPtr copy = c10::GetCPUAllocator()->allocate(bytes.size());
  std::memcpy(copy.get(), bytes.data(), bytes.size());
  return copy;
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
  char* const data = file_->data() + (bytes->data() - file_->data());
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(data) % kElementAlignment == 0;
  c10::DataPtr pointer =
      is_aligned ? c10::DataPtr(data, new std::shared_ptr<MappedFile>(file_),
                                &release_mapping, c10::Device(c10::kCPU))
                 : copy_aligned(bytes->substr(0, size));
  c10::Storage storage(c10::Storage::use_byte_size_t(), size,
                       std::move(pointer));
  storages_[tensor.storage_key] = storage;
  return storage;
}

absl::StatusOr<at::Tensor> PtReader::tensor(const PtValue& value) {
  const PickledTensor pickled = value.as_tensor();
  FS_ASSIGN_OR_RETURN(c10::Storage storage, this->storage(pickled));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(pickled.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      pickled.sizes, pickled.strides, pickled.storage_offset);
  return tensor;
}

absl::Status PtReader::verify() const {
  for (const ZipReader::Entry& entry : zip_.entries()) {
    FS_RETURN_IF_ERROR(annotate(zip_.verify(entry), path_));
  }
  return absl::OkStatus();
}

}  // namespace fullshard
