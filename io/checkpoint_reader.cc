#include "fullshard/io/checkpoint_reader.h"

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "fullshard/core/status.h"
#include "fullshard/io/dtype_names.h"
#include "fullshard/io/file_kind.h"
#include "fullshard/io/file_system.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/pt_reader.h"
#include "fullshard/io/safetensors_names.h"
#include "fullshard/io/safetensors_reader.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/io/weight_map.h"

namespace fullshard {
namespace {

bool exists(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0;
}

bool is_folder(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

// A value that is no dict, list or tensor, as Python prints it.
std::string scalar_text(const PtValue& value) {
  switch (value.kind()) {
    case PtKind::kNone:
      return "None";
    case PtKind::kBool:
      return value.as_bool() ? "True" : "False";
    case PtKind::kInt:
      return absl::StrCat(value.as_int());
    case PtKind::kFloat:
      return absl::StrCat(value.as_float());
    case PtKind::kString:
    case PtKind::kDevice:
      return value.as_string();
    case PtKind::kDtype:
      return absl::StrCat("torch.", find_dtype(value.as_dtype())->name);
    default:
      return kind_name(value.kind());
  }
}

bool is_sequence(PtKind kind) {
  return kind == PtKind::kList || kind == PtKind::kTuple ||
         kind == PtKind::kSize;
}

class SafetensorsCheckpoint : public CheckpointReader {
 public:
  SafetensorsCheckpoint(std::string path,
                        std::unique_ptr<SafetensorsReader> reader,
                        bool is_sharded)
      : CheckpointReader(std::move(path),
                         is_sharded ? "sharded safetensors" : "safetensors"),
        reader_(std::move(reader)) {
    for (const SafetensorsReader::Tensor& place : reader_->tensors()) {
      const SafetensorsFile& file = *place.file;
      const SafetensorsDtype& dtype = file.dtype(place.number);
      CheckpointTensor tensor;
      tensor.name = std::string(place.name());
      tensor.path = {tensor.name};
      tensor.scalar_type = dtype.scalar_type;
      tensor.dtype = dtype.scalar_type.has_value()
                         ? find_dtype(*dtype.scalar_type)->name
                         : absl::AsciiStrToLower(dtype.name);
      tensor.sizes = shape_in_memory(dtype, file.shape(place.number));
      tensor.num_bytes = static_cast<int64_t>(file.bytes(place.number).size());
      tensors_.push_back(std::move(tensor));
    }
    for (const auto& [key, value] : reader_->metadata()) {
      metadata_.emplace_back(key, value);
    }
  }

  absl::StatusOr<at::Tensor> tensor(size_t i) override {
    const SafetensorsReader::Tensor& place = reader_->tensors()[i];
    return place.file->tensor(place.number);
  }

  absl::StatusOr<absl::string_view> bytes(size_t i) override {
    const SafetensorsReader::Tensor& place = reader_->tensors()[i];
    if (tensors_[i].scalar_type.has_value()) return CheckpointReader::bytes(i);
    FS_RETURN_IF_ERROR(place.file->check_whole());
    return place.file->bytes(place.number);
  }

 private:
  const std::unique_ptr<SafetensorsReader> reader_;
};

class PtCheckpoint : public CheckpointReader {
 public:
  PtCheckpoint(std::string path, std::string format)
      : CheckpointReader(std::move(path), std::move(format)) {}

  // Takes every value of a file; with `wanted` only those top-level keys.
  absl::Status add_file(const std::string& path,
                        const std::vector<std::string>* wanted) {
    FS_ASSIGN_OR_RETURN(std::unique_ptr<PtReader> reader, PtReader::open(path));
    files_.push_back(std::move(reader));
    const PtReader& file = *files_.back();
    if (wanted == nullptr) {
      if (file.is_legacy()) format_ = absl::StrCat("legacy ", format_);
      std::vector<std::string> keys;
      add(file.root(), &keys);
      return check_names();
    }
    for (const std::string& name : *wanted) {
      const std::optional<PtValue> value = file.root().find(name);
      if (!value.has_value()) {
        return absl::DataLossError(
            absl::StrCat(path_, ": \"", name, "\" is not in ", path));
      }
      std::vector<std::string> keys = {name};
      add(*value, &keys);
    }
    return check_names();
  }

  absl::StatusOr<at::Tensor> tensor(size_t i) override {
    const auto& [file, value] = values_[i];
    return files_[file]->tensor(value);
  }

 private:
  void add(const PtValue& value, std::vector<std::string>* keys) {
    if (value.is_tensor()) return add_tensor(value, *keys);
    const bool is_container = value.is_dict() || is_sequence(value.kind());
    if (!is_container || value.size() == 0) {
      metadata_.emplace_back(absl::StrJoin(*keys, "."),
                             !is_container     ? scalar_text(value)
                             : value.is_dict() ? "{}"
                                               : "[]");
      return;
    }
    for (size_t i = 0; i < value.size(); ++i) {
      keys->push_back(value.is_dict() ? scalar_text(value.key(i))
                                      : absl::StrCat(i));
      add(value.item(i), keys);
      keys->pop_back();
    }
  }

  void add_tensor(const PtValue& value, const std::vector<std::string>& keys) {
    const PickledTensor pickled = value.as_tensor();
    CheckpointTensor tensor;
    tensor.name = absl::StrJoin(keys, ".");
    tensor.path = keys;
    tensor.dtype = find_dtype(pickled.dtype)->name;
    tensor.scalar_type = pickled.dtype;
    tensor.sizes = pickled.sizes;
    tensor.num_bytes = static_cast<int64_t>(c10::elementSize(pickled.dtype));
    for (const int64_t size : pickled.sizes) tensor.num_bytes *= size;
    const auto [known, is_new] =
        seen_.emplace(std::make_tuple(files_.size(), pickled.storage_key,
                                      pickled.storage_offset, pickled.sizes,
                                      pickled.strides, pickled.dtype),
                      tensors_.size());
    if (!is_new) tensor.tied_to = known->second;
    tensors_.push_back(std::move(tensor));
    values_.emplace_back(files_.size() - 1, value);
  }

  absl::Status check_names() const {
    std::set<absl::string_view> names;
    for (const CheckpointTensor& tensor : tensors_) {
      if (!names.insert(tensor.name).second) {
        return absl::InvalidArgumentError(absl::StrCat(
            path_, ": two tensors have the name \"", tensor.name, "\""));
      }
    }
    return absl::OkStatus();
  }

  std::vector<std::unique_ptr<PtReader>> files_;
  std::vector<std::pair<size_t, PtValue>> values_;  // file and value
  std::map<std::tuple<size_t, std::string, int64_t, std::vector<int64_t>,
                      std::vector<int64_t>, c10::ScalarType>,
           size_t>
      seen_;
};

using Opened = absl::StatusOr<std::unique_ptr<CheckpointReader>>;

Opened open_safetensors(const std::string& path, const std::string& file,
                        bool is_sharded) {
  FS_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsReader> reader,
                      SafetensorsReader::open(file));
  return std::make_unique<SafetensorsCheckpoint>(path, std::move(reader),
                                                 is_sharded);
}

// One that all ranks of a job wrote, or Python's DCP.
class ShardedCheckpoint final : public CheckpointReader {
 public:
  static Opened open(const std::string& path) {
    FS_ASSIGN_OR_RETURN(std::unique_ptr<ShardedCheckpointReader> reader,
                        ShardedCheckpointReader::open(path));
    return std::unique_ptr<CheckpointReader>(
        new ShardedCheckpoint(path, std::move(reader)));
  }

  absl::StatusOr<at::Tensor> tensor(size_t i) override {
    return reader_->tensor(reader_->manifest().tensors[source_[i]]);
  }

 private:
  ShardedCheckpoint(const std::string& path,
                    std::unique_ptr<ShardedCheckpointReader> reader)
      : CheckpointReader(path, reader->is_of_python() ? "dcp" : "sharded"),
        reader_(std::move(reader)) {
    const ShardedManifest& manifest = reader_->manifest();
    for (size_t i = 0; i < manifest.tensors.size(); ++i) {
      const size_t first = tensors_.size();
      add(i, manifest.tensors[i].path);
      for (const auto& alias : manifest.tensors[i].aliases) {
        add(i, alias);
        tensors_.back().tied_to = first;
      }
    }
    metadata_.assign(manifest.state.begin(), manifest.state.end());
  }

  void add(size_t source, const std::vector<std::string>& tensor_path) {
    const ShardedManifest::Tensor& saved = reader_->manifest().tensors[source];
    CheckpointTensor& tensor = tensors_.emplace_back();
    tensor.name = flat_name(tensor_path);
    tensor.path = tensor_path;
    tensor.dtype = find_dtype(saved.dtype)->name;
    tensor.scalar_type = saved.dtype;
    tensor.sizes = saved.sizes;
    tensor.num_bytes =
        saved.numel() * static_cast<int64_t>(c10::elementSize(saved.dtype));
    source_.push_back(source);
  }

  const std::unique_ptr<ShardedCheckpointReader> reader_;
  std::vector<size_t> source_;  // By tensor, into the manifest's.
};

Opened open_pt(const std::string& path, const std::string& file) {
  auto checkpoint = std::make_unique<PtCheckpoint>(path, "pt");
  FS_RETURN_IF_ERROR(checkpoint->add_file(file, nullptr));
  return checkpoint;
}

// An index of safetensors or of .pt files: the files' own names tell.
Opened open_index(const std::string& path, const std::string& index) {
  FS_ASSIGN_OR_RETURN(const WeightMap map, read_weight_map(index));
  const bool is_safetensors =
      map.empty() || absl::EndsWith(map.begin()->first, ".safetensors");
  if (is_safetensors) return open_safetensors(path, index, true);
  auto checkpoint = std::make_unique<PtCheckpoint>(path, "sharded pt");
  for (const auto& [file, names] : map) {
    FS_RETURN_IF_ERROR(
        annotate(checkpoint->add_file(
                     absl::StrCat(parent_directory(index), "/", file), &names),
                 index));
  }
  return checkpoint;
}

Opened open_file(const std::string& path, const std::string& file) {
  if (absl::EndsWith(file, ".json")) return open_index(path, file);
  FileKind kind = FileKind::kUnknown;
  {
    FS_ASSIGN_OR_RETURN(const std::shared_ptr<MappedFile> mapped,
                        MappedFile::open(file));
    kind = file_kind(mapped->bytes());
  }
  if (kind == FileKind::kSafetensors || absl::EndsWith(file, ".safetensors")) {
    return open_safetensors(path, file, false);
  }
  return open_pt(path, file);
}

}  // namespace

absl::StatusOr<absl::string_view> CheckpointReader::bytes(size_t i) {
  return absl::UnimplementedError(
      absl::StrCat(path_, ": tensor \"", tensors_[i].name,
                   "\" is a tensor of LibTorch; read it as such"));
}

Opened open_checkpoint(const std::string& path) {
  if (!is_folder(path)) return open_file(path, path);
  for (const char* const name : {kManifestName, ".metadata"}) {
    if (exists(absl::StrCat(path, "/", name))) {
      return ShardedCheckpoint::open(path);
    }
  }
  constexpr const char* kNames[] = {kSafetensorsIndexName,
                                    kSafetensorsName,
                                    "pytorch_model.bin.index.json",
                                    "pytorch_model.bin",
                                    "latest-checkpoint.pt",
                                    "checkpoints/latest-checkpoint.pt",
                                    "latest",
                                    "checkpoints/latest"};
  for (const char* const name : kNames) {
    const std::string file = absl::StrCat(path, "/", name);
    if (is_folder(file)) return ShardedCheckpoint::open(file);
    if (exists(file)) return open_file(path, file);
  }
  return absl::NotFoundError(absl::StrCat(
      path, " holds no checkpoint; looked for ", absl::StrJoin(kNames, ", ")));
}

}  // namespace fullshard
