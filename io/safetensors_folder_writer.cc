#include "fullshard/io/safetensors_folder_writer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "fullshard/core/status.h"
#include "fullshard/io/json_scanner.h"
#include "fullshard/io/safetensors_names.h"

namespace fullshard {

absl::StatusOr<std::unique_ptr<SafetensorsFolderWriter>>
SafetensorsFolderWriter::create(const std::string& path,
                                const std::vector<SafetensorsTensor>& tensors,
                                const SafetensorsFolderOptions& options) {
  if (options.max_shard_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_shard_bytes is ", options.max_shard_bytes,
                     ", expected a positive number"));
  }
  FileSystem& file_system = options.file_system == nullptr
                                ? FileSystem::posix()
                                : *options.file_system;
  FS_ASSIGN_OR_RETURN(std::unique_ptr<AtomicFolder> folder,
                      AtomicFolder::create(path, file_system));
  std::unique_ptr<SafetensorsFolderWriter> writer(
      new SafetensorsFolderWriter(std::move(folder), options));
  FS_RETURN_IF_ERROR(writer->plan(tensors));
  return writer;
}

absl::Status SafetensorsFolderWriter::plan(
    const std::vector<SafetensorsTensor>& tensors) {
  shards_.emplace_back();
  int64_t shard_bytes = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    const int64_t size =
        safetensors_bytes(*tensor.dtype, tensor.shape).value_or(-1);
    if (size < 0 || size > INT64_MAX - total_bytes_) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor \"", tensor.name, "\" is too large or ends inside a byte"));
    }
    if (!shards_.back().tensors.empty() &&
        size > options_.max_shard_bytes - shard_bytes) {
      shards_.emplace_back();
      shard_bytes = 0;
    }
    if (!shard_of_.emplace(tensor.name, shards_.size() - 1).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", tensor.name, "\" appears twice"));
    }
    shards_.back().tensors.push_back(tensor);
    shard_bytes += size;
    total_bytes_ += size;
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    shards_[i].file_name =
        shards_.size() == 1 ? kSafetensorsName
                            : absl::StrFormat("model-%05d-of-%05d.safetensors",
                                              i + 1, shards_.size());
  }
  return absl::OkStatus();
}

absl::StatusOr<SafetensorsFolderWriter::Shard*>
SafetensorsFolderWriter::open_shard(const std::string& name) {
  const auto found = shard_of_.find(name);
  if (found == shard_of_.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        folder_->path(), ": tensor \"", name, "\" was not announced"));
  }
  Shard* const shard = &shards_[found->second];
  if (shard->is_done) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder_->path(), ": tensor \"", name, "\" comes twice"));
  }
  if (shard->writer == nullptr) {
    SafetensorsWriterOptions options;
    options.metadata = options_.metadata;
    options.file_system = options_.file_system;
    FS_ASSIGN_OR_RETURN(shard->writer, SafetensorsWriter::create(
                                           folder_->file(shard->file_name),
                                           shard->tensors, options));
  }
  return shard;
}

absl::Status SafetensorsFolderWriter::close_if_done(Shard* shard) {
  if (shard->writer->num_missing() > 0) return absl::OkStatus();
  FS_RETURN_IF_ERROR(shard->writer->commit());
  shard->writer.reset();
  shard->is_done = true;
  return absl::OkStatus();
}

absl::Status SafetensorsFolderWriter::tensor(const std::string& name,
                                             const at::Tensor& tensor) {
  FS_ASSIGN_OR_RETURN(Shard* const shard, open_shard(name));
  FS_RETURN_IF_ERROR(shard->writer->tensor(name, tensor));
  return close_if_done(shard);
}

absl::Status SafetensorsFolderWriter::bytes(const std::string& name,
                                            absl::string_view bytes) {
  FS_ASSIGN_OR_RETURN(Shard* const shard, open_shard(name));
  FS_RETURN_IF_ERROR(shard->writer->bytes(name, bytes));
  return close_if_done(shard);
}

absl::Status SafetensorsFolderWriter::add_file(const std::string& name,
                                               absl::string_view bytes) {
  return folder_->add_file(name, bytes);
}

std::string SafetensorsFolderWriter::index_json() const {
  std::string out =
      absl::StrCat("{\n  \"metadata\": {\n    \"total_size\": ", total_bytes_,
                   "\n  },\n  \"weight_map\": {");
  const char* separator = "\n";
  for (const Shard& shard : shards_) {
    for (const SafetensorsTensor& tensor : shard.tensors) {
      absl::StrAppend(&out, separator, "    ", json_string(tensor.name), ": ",
                      json_string(shard.file_name));
      separator = ",\n";
    }
  }
  return out + "\n  }\n}\n";
}

absl::Status SafetensorsFolderWriter::commit() {
  if (shard_of_.empty()) {
    // A file without tensors is complete from the start.
    FS_ASSIGN_OR_RETURN(
        shards_[0].writer,
        SafetensorsWriter::create(folder_->file(shards_[0].file_name), {},
                                  {options_.metadata, options_.file_system}));
    FS_RETURN_IF_ERROR(close_if_done(&shards_[0]));
  }
  for (const Shard& shard : shards_) {
    if (shard.is_done) continue;
    if (shard.writer != nullptr) return shard.writer->commit();
    return absl::FailedPreconditionError(
        absl::StrCat(folder_->path(), ": tensor \"", shard.tensors[0].name,
                     "\" did not come"));
  }
  if (shards_.size() > 1) {
    FS_RETURN_IF_ERROR(folder_->add_file(kSafetensorsIndexName, index_json()));
  }
  return folder_->commit();
}

}  // namespace fullshard
