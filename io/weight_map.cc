#include "fullshard/io/weight_map.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "fullshard/core/status.h"
#include "fullshard/io/json_scanner.h"
#include "fullshard/io/mapped_file.h"

namespace fullshard {
namespace {

absl::Status check_file_name(const std::string& name) {
  if (!name.empty() && name != "." && name != ".." &&
      !absl::StrContains(name, "/") && name.find('\0') == std::string::npos) {
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat("\"", name, "\" is not a plain file name"));
}

absl::Status check_names(WeightMap* map) {
  std::vector<absl::string_view> names;
  for (const auto& [file, tensors] : *map) {
    names.insert(names.end(), tensors.begin(), tensors.end());
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("tensor \"", *twice, "\" appears twice"));
}

absl::StatusOr<WeightMap> parse(absl::string_view text) {
  WeightMap map;
  bool found = false;
  JsonScanner json(text);
  const auto add = [&](absl::string_view raw_name) -> absl::Status {
    FS_ASSIGN_OR_RETURN(const absl::string_view raw_file, json.string());
    FS_ASSIGN_OR_RETURN(std::string name, decode_json_string(raw_name));
    FS_ASSIGN_OR_RETURN(std::string file, decode_json_string(raw_file));
    FS_RETURN_IF_ERROR(check_file_name(file));
    map[std::move(file)].push_back(std::move(name));
    return absl::OkStatus();
  };
  FS_RETURN_IF_ERROR(json.object([&](absl::string_view key) -> absl::Status {
    if (key != "weight_map") return json.skip_value().status();
    if (std::exchange(found, true)) {
      return absl::DataLossError("weight_map appears twice");
    }
    return json.object(add);
  }));
  FS_RETURN_IF_ERROR(json.end());
  if (!found) return absl::DataLossError("weight_map is missing");
  FS_RETURN_IF_ERROR(check_names(&map));
  return map;
}

}  // namespace

absl::StatusOr<WeightMap> read_weight_map(const std::string& path) {
  FS_ASSIGN_OR_RETURN(const std::shared_ptr<MappedFile> file,
                      MappedFile::open(path));
  absl::StatusOr<WeightMap> map = parse(file->bytes());
  if (!map.ok()) return annotate(map.status(), path);
  return map;
}

}  // namespace fullshard
