#include "fullshard/io/pt_writer.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/dtype_names.h"
#include "fullshard/io/utf8.h"

namespace fullshard {
namespace {

constexpr char kRoot[] = "archive/";

std::string storage_path(const std::string& key) {
  return absl::StrCat(kRoot, "data/", key);
}

// True if the elements fill one range of memory without gaps or overlap.
bool is_dense(const at::Tensor& tensor) {
  std::vector<int64_t> order(static_cast<size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return tensor.stride(a) < tensor.stride(b);
  });
  int64_t expected = 1;
  for (const int64_t d : order) {
    if (tensor.size(d) == 1) continue;
    if (tensor.stride(d) != expected) return false;
    expected *= tensor.size(d);
  }
  return true;
}

absl::Status check_kind(const at::Tensor& tensor) {
  if (!tensor.defined()) return absl::InvalidArgumentError("undefined tensor");
  if (tensor.layout() != c10::kStrided || tensor.is_meta() ||
      find_dtype(tensor.scalar_type()) == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a tensor of dtype ", c10::toString(tensor.scalar_type()), " on ",
        tensor.device().str(), ", expected dense elements with memory"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PtWriter>> PtWriter::create(
    const std::string& path, const PtWriterOptions& options) {
  FileSystem& file_system = options.file_system == nullptr
                                ? FileSystem::posix()
                                : *options.file_system;
  FS_ASSIGN_OR_RETURN(std::unique_ptr<AtomicFile> file,
                      AtomicFile::create(path, file_system));
  return std::unique_ptr<PtWriter>(new PtWriter(std::move(file), options));
}

PtWriter::PtWriter(std::unique_ptr<AtomicFile> file,
                   const PtWriterOptions& options)
    : options_(options),
      file_(std::move(file)),
      zip_(file_->sink()),
      open_dicts_(1) {
  if (options.ordered_root) {
    pickle_.begin_ordered_dict();
  } else {
    pickle_.begin_dict();
  }
}

absl::Status PtWriter::add_key(const std::string& key) {
  if (!is_utf8(key)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path(), ": key \"", key, "\" is not UTF-8"));
  }
  if (!open_dicts_.back().insert(key).second) {
    return absl::InvalidArgumentError(
        absl::StrCat(path(), ": key \"", key, "\" appears twice"));
  }
  pickle_.string(key);
  return absl::OkStatus();
}

absl::Status PtWriter::begin_dict(const std::string& key) {
  FS_RETURN_IF_ERROR(add_key(key));
  pickle_.begin_dict();
  open_dicts_.emplace_back();
  return absl::OkStatus();
}

absl::Status PtWriter::begin_ordered_dict(const std::string& key) {
  FS_RETURN_IF_ERROR(add_key(key));
  pickle_.begin_ordered_dict();
  open_dicts_.emplace_back();
  return absl::OkStatus();
}

absl::Status PtWriter::end_dict() {
  if (open_dicts_.size() <= 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(path(), ": end_dict without begin_dict"));
  }
  pickle_.end_dict();
  open_dicts_.pop_back();
  return absl::OkStatus();
}

absl::Status PtWriter::tensor(const std::string& key,
                              const at::Tensor& tensor) {
  FS_RETURN_IF_ERROR(add_key(key));
  absl::StatusOr<PickledTensor> stored = store(tensor);
  if (!stored.ok()) return annotate(stored.status(), key);
  pickle_.tensor(*stored);
  return absl::OkStatus();
}

absl::Status PtWriter::place(const std::string& key,
                             const PickledTensor& stored) {
  FS_RETURN_IF_ERROR(add_key(key));
  pickle_.tensor(stored);
  return absl::OkStatus();
}

absl::Status PtWriter::value(const std::string& key, const PtScalar& value) {
  FS_RETURN_IF_ERROR(add_key(key));
  if (const auto* flag = std::get_if<bool>(&value)) {
    pickle_.boolean(*flag);
  } else if (const auto* integer = std::get_if<int64_t>(&value)) {
    pickle_.integer(*integer);
  } else if (const auto* number = std::get_if<double>(&value)) {
    pickle_.number(*number);
  } else if (const auto* text = std::get_if<std::string>(&value)) {
    if (!is_utf8(*text)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path(), ": the value of \"", key, "\" is not UTF-8"));
    }
    pickle_.string(*text);
  } else {
    pickle_.none();
  }
  return absl::OkStatus();
}

absl::StatusOr<PickledTensor> PtWriter::store(const at::Tensor& tensor) {
  FS_RETURN_IF_ERROR(check_kind(tensor));
  try {
    at::Tensor plain = tensor.detach();
    if (plain.is_conj()) plain = plain.resolve_conj();
    if (plain.is_neg()) plain = plain.resolve_neg();
    if (!plain.is_cpu()) plain = plain.cpu();
    if (!is_dense(plain)) plain = plain.contiguous();
    return store_dense(plain);
  } catch (const std::exception& error) {
    return absl::InternalError(
        absl::StrCat("the tensor cannot be read: ", error.what()));
  }
}

absl::StatusOr<PickledTensor> PtWriter::store_dense(const at::Tensor& tensor) {
  const auto element_bytes = static_cast<int64_t>(tensor.element_size());
  const int64_t begin = tensor.storage_offset() * element_bytes;
  const int64_t end = begin + tensor.numel() * element_bytes;
  PickledTensor stored;
  stored.dtype = tensor.scalar_type();
  stored.sizes = tensor.sizes().vec();
  stored.strides = tensor.strides().vec();
  if (find_written(tensor, begin, end, &stored)) return stored;
  stored.storage_bytes = end - begin;
  FS_ASSIGN_OR_RETURN(stored.storage_key, write_storage(tensor.const_data_ptr(),
                                                        stored.storage_bytes));
  remember(tensor, begin, end, stored.storage_key);
  return stored;
}

bool PtWriter::find_written(const at::Tensor& tensor, int64_t begin,
                            int64_t end, PickledTensor* out) const {
  const auto found = written_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == written_.end() || begin == end) return false;
  auto range = found->second.ranges.upper_bound(begin);
  if (range == found->second.ranges.begin()) return false;
  --range;
  const WrittenRange& written = range->second;
  if (written.end < end || written.dtype != tensor.scalar_type()) return false;
  const auto element_bytes = static_cast<int64_t>(tensor.element_size());
  out->storage_key = written.key;
  out->storage_bytes = written.end - range->first;
  out->storage_offset = (begin - range->first) / element_bytes;
  return true;
}

void PtWriter::remember(const at::Tensor& tensor, int64_t begin, int64_t end,
                        const std::string& key) {
  if (!options_.share_storages || begin == end) return;
  const c10::Storage& storage = tensor.storage();
  const auto [found, is_new] =
      written_.try_emplace(storage.unsafeGetStorageImpl(),
                           WrittenStorage{storage.getWeakStorageImpl(), {}});
  found->second.ranges.insert_or_assign(
      begin, WrittenRange{end, tensor.scalar_type(), key});
}

std::string PtWriter::next_storage() { return absl::StrCat(num_storages_++); }

absl::StatusOr<PtWriter::Reserved> PtWriter::reserve(
    c10::ScalarType dtype, const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& strides) {
  if (find_dtype(dtype) == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        path(), ": no checkpoint holds dtype ", c10::toString(dtype)));
  }
  Reserved reserved;
  PickledTensor& stored = reserved.stored;
  stored.dtype = dtype;
  stored.sizes = sizes;
  stored.strides = strides;
  stored.storage_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) stored.storage_bytes *= size;
  stored.storage_key = next_storage();
  FS_ASSIGN_OR_RETURN(
      reserved.entry,
      zip_.reserve(storage_path(stored.storage_key),
                   static_cast<uint64_t>(stored.storage_bytes)));
  reserved.offset = zip_.last_data_offset();
  return reserved;
}

absl::Status PtWriter::complete(const Reserved& reserved, uint32_t crc) {
  return zip_.complete(reserved.entry, crc);
}

absl::StatusOr<std::string> PtWriter::write_storage(const void* data,
                                                    int64_t size) {
  std::string key = next_storage();
  FS_RETURN_IF_ERROR(
      zip_.add(storage_path(key), data, static_cast<size_t>(size)));
  return key;
}

absl::Status PtWriter::commit() {
  if (open_dicts_.size() != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        path(), ": ", open_dicts_.size() - 1, " dicts have not ended"));
  }
  pickle_.end_dict();
  const std::string pickle = pickle_.finish();
  FS_RETURN_IF_ERROR(zip_.add(absl::StrCat(kRoot, "data.pkl"), pickle));
  FS_RETURN_IF_ERROR(zip_.add(absl::StrCat(kRoot, "byteorder"), "little"));
  FS_RETURN_IF_ERROR(zip_.add(absl::StrCat(kRoot, "version"), "3\n"));
  FS_RETURN_IF_ERROR(zip_.finish());
  return file_->commit();
}

}  // namespace fullshard
