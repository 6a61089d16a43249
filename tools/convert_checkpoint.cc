#include "fullshard/tools/convert_checkpoint.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
#include "fullshard/io/checkpoint_reader.h"
#include "fullshard/io/full_state_dict.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/mapped_storage.h"
#include "fullshard/io/pt_writer.h"
#include "fullshard/io/safetensors.h"
#include "fullshard/io/sharded_checkpoint_writer.h"
#include "fullshard/io/utf8.h"

namespace fullshard {
namespace {

constexpr size_t kLargestCopiedFile = size_t{100} << 20;
constexpr int64_t kMaxRepeat = 16;
constexpr int64_t kSmallBytes = int64_t{1} << 20;

// One tensor of the output.
struct Item {
  size_t source;  // in the reader
  std::string name;
};

class Converter {
 public:
  Converter(CheckpointReader& reader, std::string output,
            const ConvertOptions& options)
      : reader_(reader), output_(std::move(output)), options_(options) {}

  absl::StatusOr<ConvertReport> run() {
    report_.input_format = reader_.format();
    select();
    FS_RETURN_IF_ERROR(rename());
    const auto ends = [&](const char* end) {
      return absl::EndsWith(output_, end);
    };
    FS_RETURN_IF_ERROR(ends(".pt") || ends(".pth") || ends(".bin") ? write_pt()
                       : ends(".safetensors") ? write_safetensors()
                       : is_sharded_name()    ? write_sharded()
                                              : write_folder());
    report_.num_tensors = items_.size();
    for (const Item& item : items_) {
      report_.num_bytes += reader_.tensors()[item.source].num_bytes;
    }
    return std::move(report_);
  }

 private:
  // Takes what lies in the dict that holds the model, else everything.
  void select() {
    const std::vector<CheckpointTensor>& tensors = reader_.tensors();
    for (const char* wrapper : {"model", "state_dict"}) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        const std::vector<std::string>& path = tensors[i].path;
        if (path.size() < 2 || path[0] != wrapper) continue;
        items_.push_back({i, absl::StrJoin(path.begin() + 1, path.end(), ".")});
      }
      if (!items_.empty()) break;
    }
    const bool take_all = items_.empty();
    std::vector<bool> taken(tensors.size(), take_all);
    for (const Item& item : items_) taken[item.source] = true;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (take_all) items_.push_back({i, tensors[i].name});
      if (!taken[i]) report_.left_out.push_back(tensors[i].name);
    }
  }

  absl::Status rename() {
    if (!options_.to.has_value()) return absl::OkStatus();
    std::vector<std::string> names;
    for (const Item& item : items_) names.push_back(item.name);
    report_.from =
        options_.from.has_value() ? options_.from : recognise_key_style(names);
    if (!report_.from.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(reader_.path(),
                       ": its names show no known key style; say which one"));
    }
    const auto mapped =
        map_keys(names, {*report_.from, *options_.to, options_.fused_tower});
    if (!mapped.ok()) return annotate(mapped.status(), reader_.path());
    std::vector<Item> kept;
    for (size_t i = 0; i < items_.size(); ++i) {
      if ((*mapped)[i].has_value()) {
        kept.push_back({items_[i].source, *(*mapped)[i]});
      } else {
        report_.left_out.push_back(items_[i].name);
      }
    }
    items_ = std::move(kept);
    return absl::OkStatus();
  }

  absl::StatusOr<at::Tensor> read(const Item& item) {
    FS_ASSIGN_OR_RETURN(at::Tensor tensor, reader_.tensor(item.source));
    const auto stored = static_cast<int64_t>(tensor.storage().nbytes());
    if (static_cast<int64_t>(tensor.nbytes()) / kMaxRepeat <=
        stored + kSmallBytes) {
      return tensor;
    }
    return absl::UnimplementedError(absl::StrCat(
        reader_.path(), ": tensor \"", item.name, "\" repeats ", stored,
        " bytes to ", tensor.nbytes(), "; save it contiguous first"));
  }

  // Writes items that are one tensor in the input as one: `store` the first
  // time, `tie` with the first one's name after that.
  template <class Store, class Tie>
  absl::Status write_tied(Store store, Tie tie) {
    std::map<size_t, std::string> written;  // source -> name
    for (const Item& item : items_) {
      const size_t source =
          reader_.tensors()[item.source].tied_to.value_or(item.source);
      const auto [first, is_new] = written.emplace(source, item.name);
      if (!is_new) {
        FS_RETURN_IF_ERROR(tie(item.name, first->second));
        continue;
      }
      FS_ASSIGN_OR_RETURN(const at::Tensor tensor, read(item));
      FS_RETURN_IF_ERROR(store(item.name, tensor));
      release_pages(tensor);
    }
    return absl::OkStatus();
  }

  absl::Status write_pt() {
    report_.output_format = "pt";
    for (const auto& [name, value] : reader_.metadata()) {
      if (name == "format" && value == "pt") continue;  // It says nothing.
      report_.left_out.push_back(absl::StrCat(name, " = ", value));
    }
    if (output_style() == KeyStyle::kPrismatic) return write_prismatic();
    PtWriterOptions options;
    options.ordered_root = true;
    options.share_storages = false;
    options.file_system = options_.file_system;
    FS_ASSIGN_OR_RETURN(const std::unique_ptr<PtWriter> writer,
                        PtWriter::create(output_, options));
    std::map<std::string, PickledTensor> stored;
    FS_RETURN_IF_ERROR(write_tied(
        [&](const std::string& name, const at::Tensor& tensor) -> absl::Status {
          FS_ASSIGN_OR_RETURN(stored[name], writer->store(tensor));
          return writer->place(name, stored[name]);
        },
        [&](const std::string& name, const std::string& first) {
          return writer->place(name, stored[first]);
        }));
    return writer->commit();
  }

  absl::Status write_prismatic() {
    report_.output_format = "pt (modules)";
    FullStateDictOptions options;
    options.file_system = options_.file_system;
    for (const Item& item : items_) {
      const std::string module = item.name.substr(0, item.name.find('.'));
      options.names.push_back(item.name);
      if (std::find(options.module_keys.begin(), options.module_keys.end(),
                    module) == options.module_keys.end()) {
        options.module_keys.push_back(module);
      }
    }
    FS_ASSIGN_OR_RETURN(const std::unique_ptr<FullStateDictWriter> writer,
                        FullStateDictWriter::create(output_, options));
    FS_RETURN_IF_ERROR(write_tied(
        [&](const std::string& name, const at::Tensor& tensor) {
          return writer->add(name, tensor);
        },
        [&](const std::string& name, const std::string& first) {
          return writer->add_tied(name, first);
        }));
    return writer->commit();
  }

  std::optional<KeyStyle> output_style() const {
    if (options_.to.has_value()) return options_.to;
    std::vector<std::string> names;
    for (const Item& item : items_) names.push_back(item.name);
    return recognise_key_style(names);
  }

  absl::StatusOr<std::vector<SafetensorsTensor>> announce() {
    std::vector<SafetensorsTensor> announced;
    for (const Item& item : items_) {
      const CheckpointTensor& source = reader_.tensors()[item.source];
      if (!source.scalar_type.has_value()) {
        const std::string dtype = absl::AsciiStrToUpper(source.dtype);
        announced.push_back(
            {item.name, find_safetensors_dtype(dtype), source.sizes});
        continue;
      }
      FS_ASSIGN_OR_RETURN(
          SafetensorsTensor tensor,
          describe_safetensors(item.name, *source.scalar_type, source.sizes));
      announced.push_back(std::move(tensor));
    }
    return announced;
  }

  std::map<std::string, std::string> metadata() {
    std::map<std::string, std::string> kept;
    for (const auto& [name, value] : reader_.metadata()) {
      if (is_utf8(name) && is_utf8(value)) {
        kept.emplace(name, value);
      } else {
        report_.left_out.push_back(absl::StrCat(name, " = ", value));
      }
    }
    kept.emplace("format", "pt");
    return kept;
  }

  template <class Writer>
  absl::Status write_items(Writer* writer) {
    for (const Item& item : items_) {
      if (!reader_.tensors()[item.source].scalar_type.has_value()) {
        FS_ASSIGN_OR_RETURN(const absl::string_view bytes,
                            reader_.bytes(item.source));
        FS_RETURN_IF_ERROR(writer->bytes(item.name, bytes));
        continue;
      }
      FS_ASSIGN_OR_RETURN(const at::Tensor tensor, read(item));
      FS_RETURN_IF_ERROR(writer->tensor(item.name, tensor));
      release_pages(tensor);
    }
    return absl::OkStatus();
  }

  absl::Status write_safetensors() {
    report_.output_format = "safetensors";
    FS_ASSIGN_OR_RETURN(const std::vector<SafetensorsTensor> announced,
                        announce());
    FS_ASSIGN_OR_RETURN(
        const std::unique_ptr<SafetensorsWriter> writer,
        SafetensorsWriter::create(output_, announced,
                                  {metadata(), options_.file_system}));
    FS_RETURN_IF_ERROR(write_items(writer.get()));
    return writer->commit();
  }

  bool is_sharded_name() const {
    const std::string name = std::filesystem::path(output_).filename();
    absl::string_view step = name;
    int64_t ignored = 0;
    return absl::EndsWith(name, ".dcp") ||
           (absl::ConsumePrefix(&step, "step-") &&
            absl::SimpleAtoi(step, &ignored));
  }

  absl::Status write_sharded() {
    report_.output_format = "sharded";
    std::error_code error;
    if (std::filesystem::exists(output_, error)) {
      return absl::AlreadyExistsError(
          absl::StrCat(output_, " exists, expected a new folder"));
    }
    std::vector<ShardToSave> shards;
    std::map<std::string, size_t> place;  // name -> in `shards`
    FS_RETURN_IF_ERROR(write_tied(
        [&](const std::string& name, const at::Tensor& tensor) {
          place[name] = shards.size();
          ShardToSave& shard = shards.emplace_back();
          shard.path = {"model", name};
          shard.sizes = tensor.sizes().vec();
          shard.order = memory_order(shard.sizes, tensor.strides().vec());
          shard.values = elements_in_order(tensor, shard.order);
          return absl::OkStatus();
        },
        [&](const std::string& name, const std::string& first) {
          shards[place[first]].aliases.push_back({"model", name});
          return absl::OkStatus();
        }));
    FileSystem& file_system = options_.file_system != nullptr
                                  ? *options_.file_system
                                  : FileSystem::posix();
    FS_RETURN_IF_ERROR(ShardedCheckpointWriter::prepare(output_, file_system));
    ShardedCheckpointWriter writer(output_, /*rank=*/0, /*world_size=*/1,
                                   std::chrono::seconds(1), file_system);
    return writer.write(shards, metadata());
  }

  absl::Status write_folder() {
    report_.output_format = "folder of safetensors";
    FS_ASSIGN_OR_RETURN(const std::vector<SafetensorsTensor> announced,
                        announce());
    SafetensorsFolderOptions options;
    options.max_shard_bytes = options_.max_shard_bytes;
    options.metadata = metadata();
    options.file_system = options_.file_system;
    FS_ASSIGN_OR_RETURN(
        const std::unique_ptr<SafetensorsFolderWriter> writer,
        SafetensorsFolderWriter::create(output_, announced, options));
    FS_RETURN_IF_ERROR(write_items(writer.get()));
    FS_RETURN_IF_ERROR(copy_other_files(writer.get()));
    return writer->commit();
  }

  absl::Status copy_other_files(SafetensorsFolderWriter* writer) {
    std::error_code error;
    if (options_.to.has_value() ||
        !std::filesystem::is_directory(reader_.path(), error)) {
      return absl::OkStatus();
    }
    for (const auto& entry :
         std::filesystem::directory_iterator(reader_.path(), error)) {
      const std::string name = entry.path().filename().string();
      if (!entry.is_regular_file(error) || is_weights(name)) continue;
      if (entry.file_size(error) > kLargestCopiedFile) {
        report_.left_out.push_back(name);
        continue;
      }
      absl::string_view bytes;
      std::shared_ptr<MappedFile> file;
      if (entry.file_size(error) > 0) {
        FS_ASSIGN_OR_RETURN(file, MappedFile::open(entry.path().string()));
        bytes = file->bytes();
      }
      FS_RETURN_IF_ERROR(writer->add_file(name, bytes));
      report_.copied_files.push_back(name);
    }
    std::sort(report_.copied_files.begin(), report_.copied_files.end());
    return absl::OkStatus();
  }

  static bool is_weights(const std::string& name) {
    for (const char* end : {".safetensors", ".bin", ".pt", ".pth",
                            ".safetensors.index.json", ".bin.index.json"}) {
      if (absl::EndsWith(name, end)) return true;
    }
    return false;
  }

  CheckpointReader& reader_;
  const std::string output_;
  const ConvertOptions options_;
  std::vector<Item> items_;
  ConvertReport report_;
};

}  // namespace

absl::StatusOr<ConvertReport> convert_checkpoint(
    const std::string& input, const std::string& output,
    const ConvertOptions& options) {
  FS_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                      open_checkpoint(input));
  return Converter(*reader, output, options).run();
}

}  // namespace fullshard
