#include "fullshard/io/safetensors_reader.h"

#include <sys/stat.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/file_system.h"
#include "fullshard/io/safetensors_names.h"
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
  FS_ASSIGN_OR_RETURN(const WeightMap map, read_weight_map(path));
  for (const auto& [file_name, names] : map) {
    absl::StatusOr<std::unique_ptr<SafetensorsFile>> file =
        SafetensorsFile::open(
            absl::StrCat(parent_directory(path), "/", file_name));
    if (!file.ok()) return annotate(file.status(), path);
    std::vector<size_t> numbers;
    for (const std::string& name : names) {
      const std::optional<size_t> number = (*file)->find(name);
      if (!number.has_value()) {
        return absl::DataLossError(absl::StrCat(path, ": tensor \"", name,
                                                "\" is not in ", file_name));
      }
      numbers.push_back(*number);
    }
    std::sort(numbers.begin(), numbers.end());
    for (const size_t number : numbers) {
      tensors_.push_back({file->get(), number});
    }
    files_.push_back(*std::move(file));
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
