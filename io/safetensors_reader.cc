#include "fullshard/io/safetensors_reader.h"

#include <sys/stat.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/file_system.h"
#include "fullshard/io/json_scanner.h"
#include "fullshard/io/safetensors_names.h"

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

// tensor and file of each entry of "weight_map", as they stand in the index.
using WeightMap = std::vector<std::pair<absl::string_view, absl::string_view>>;

absl::StatusOr<WeightMap> read_weight_map(absl::string_view text) {
  WeightMap map;
  bool found = false;
  JsonScanner json(text);
  FS_RETURN_IF_ERROR(json.object([&](absl::string_view key) -> absl::Status {
    if (key != "weight_map") return json.skip_value().status();
    if (std::exchange(found, true)) {
      return absl::DataLossError("weight_map appears twice");
    }
    return json.object([&](absl::string_view name) -> absl::Status {
      FS_ASSIGN_OR_RETURN(const absl::string_view file, json.string());
      map.emplace_back(name, file);
      return absl::OkStatus();
    });
  }));
  FS_RETURN_IF_ERROR(json.end());
  if (!found) return absl::DataLossError("weight_map is missing");
  return map;
}

absl::StatusOr<std::string> decode_file_name(absl::string_view raw) {
  FS_ASSIGN_OR_RETURN(std::string name, decode_json_string(raw));
  if (name.empty() || name == "." || name == ".." ||
      absl::StrContains(name, "/") ||
      absl::StrContains(name, absl::string_view("\0", 1))) {
    return absl::DataLossError(
        absl::StrCat("\"", name, "\" is not a plain file name"));
  }
  return name;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsReader>> SafetensorsReader::open(
    const std::string& path) {
  std::unique_ptr<SafetensorsReader> reader(new SafetensorsReader(path));
  std::string file = path;
  if (is_folder(path)) {
    file = absl::StrCat(path, "/", kSafetensorsIndexName);
    if (!exists(file)) file = absl::StrCat(path, "/", kSafetensorsName);
    if (!exists(file)) {
      return absl::NotFoundError(absl::StrCat(path, " has neither ",
                                              kSafetensorsIndexName, " nor ",
                                              kSafetensorsName));
    }
  }
  FS_RETURN_IF_ERROR(absl::EndsWith(file, ".json") ? reader->open_index(file)
                                                   : reader->open_file(file));
  reader->by_name_.resize(reader->tensors_.size());
  std::iota(reader->by_name_.begin(), reader->by_name_.end(), size_t{0});
  std::sort(reader->by_name_.begin(), reader->by_name_.end(),
            [&](size_t a, size_t b) {
              return reader->tensors_[a].name() < reader->tensors_[b].name();
            });
  return reader;
}

absl::Status SafetensorsReader::open_file(const std::string& path) {
  FS_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file,
                      SafetensorsFile::open(path));
  for (size_t i = 0; i < file->size(); ++i) tensors_.push_back({file.get(), i});
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

absl::Status SafetensorsReader::open_index(const std::string& path) {
  FS_ASSIGN_OR_RETURN(const std::shared_ptr<MappedFile> index,
                      MappedFile::open(path));
  const absl::StatusOr<WeightMap> map = read_weight_map(index->bytes());
  if (!map.ok()) return annotate(map.status(), path);
  std::unordered_map<std::string, SafetensorsFile*> files;
  std::unordered_map<const SafetensorsFile*, std::vector<bool>> named;
  for (const auto& [raw_name, raw_file] : *map) {
    absl::StatusOr<std::string> file_name = decode_file_name(raw_file);
    if (!file_name.ok()) return annotate(file_name.status(), path);
    absl::StatusOr<std::string> name = decode_json_string(raw_name);
    if (!name.ok()) return annotate(name.status(), path);
    SafetensorsFile*& file = files[*file_name];
    if (file == nullptr) {
      absl::StatusOr<std::unique_ptr<SafetensorsFile>> opened =
          SafetensorsFile::open(
              absl::StrCat(parent_directory(path), "/", *file_name));
      if (!opened.ok()) return annotate(opened.status(), path);
      file = opened->get();
      files_.push_back(*std::move(opened));
      named[file].resize(file->size());
    }
    const std::optional<size_t> number = file->find(*name);
    if (!number.has_value()) {
      return absl::DataLossError(absl::StrCat(path, ": tensor \"", *name,
                                              "\" is not in ", *file_name));
    }
    if (named[file][*number]) {
      return absl::DataLossError(
          absl::StrCat(path, ": tensor \"", *name, "\" appears twice"));
    }
    named[file][*number] = true;
  }
  for (const std::unique_ptr<SafetensorsFile>& file : files_) {
    for (size_t i = 0; i < file->size(); ++i) {
      if (named[file.get()][i]) tensors_.push_back({file.get(), i});
    }
  }
  return absl::OkStatus();
}

const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  static const auto* const kNone = new std::map<std::string, std::string>();
  return files_.empty() ? *kNone : files_[0]->metadata();
}

std::optional<SafetensorsReader::Tensor> SafetensorsReader::find(
    absl::string_view name) const {
  const auto found = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                      [&](size_t i, absl::string_view wanted) {
                                        return tensors_[i].name() < wanted;
                                      });
  if (found == by_name_.end() || tensors_[*found].name() != name) {
    return std::nullopt;
  }
  return tensors_[*found];
}

absl::StatusOr<at::Tensor> SafetensorsReader::tensor(
    absl::string_view name) const {
  const std::optional<Tensor> place = find(name);
  if (place.has_value()) return place->file->tensor(place->number);
  return absl::NotFoundError(absl::StrCat(path_, ": no tensor \"", name, "\""));
}

}  // namespace fullshard
