#include "fullshard/tools/checkpoint_listing.h"

#include <algorithm>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"

namespace fullshard {
namespace {

constexpr size_t kLongestValue = 60;
constexpr size_t kWidestColumn = 100;

// Bytes that each tensor adds to the file.
int64_t total_bytes(const CheckpointReader& checkpoint) {
  int64_t total = 0;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    if (!tensor.tied_to.has_value()) total += tensor.num_bytes;
  }
  return total;
}

std::string shape_text(const std::vector<int64_t>& sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

// Readable and harmless in a terminal.
std::string safe(const std::string& text) {
  return absl::Utf8SafeCHexEscape(text);
}

std::string cut(const std::string& text) {
  if (text.size() <= kLongestValue) return safe(text);
  return absl::StrCat(safe(text.substr(0, kLongestValue)), "... (", text.size(),
                      " bytes)");
}

}  // namespace

std::string readable_bytes(int64_t num_bytes) {
  if (num_bytes < 1024) return absl::StrCat(num_bytes, " bytes");
  double value = static_cast<double>(num_bytes);
  const char* unit = "";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return absl::StrFormat("%.1f %s", value, unit);
}

std::string checkpoint_table(const CheckpointReader& checkpoint) {
  const std::vector<CheckpointTensor>& tensors = checkpoint.tensors();
  std::string out = absl::StrCat(
      safe(checkpoint.path()), ": ", checkpoint.format(), ", ", tensors.size(),
      tensors.size() == 1 ? " tensor, " : " tensors, ",
      readable_bytes(total_bytes(checkpoint)), "\n");
  for (const auto& [name, value] : checkpoint.metadata()) {
    absl::StrAppend(&out, "  ", cut(name), " = ", cut(value), "\n");
  }
  size_t name_width = 4, shape_width = 5, dtype_width = 5;
  for (const CheckpointTensor& tensor : tensors) {
    name_width = std::max(name_width, safe(tensor.name).size());
    dtype_width = std::max(dtype_width, tensor.dtype.size());
    shape_width = std::max(shape_width, shape_text(tensor.sizes).size());
  }
  const auto width = [](size_t w) {
    return static_cast<int>(std::min(w, kWidestColumn));
  };
  const auto row = [&](const std::string& name, const std::string& dtype,
                       const std::string& shape, const std::string& bytes) {
    absl::StrAppendFormat(&out, "%-*s  %-*s  %-*s  %s\n", width(name_width),
                          name, width(dtype_width), dtype, width(shape_width),
                          shape, bytes);
  };
  if (!tensors.empty()) row("name", "dtype", "shape", "size");
  for (const CheckpointTensor& tensor : tensors) {
    row(safe(tensor.name), tensor.dtype, shape_text(tensor.sizes),
        tensor.tied_to.has_value()
            ? absl::StrCat("is ", safe(tensors[*tensor.tied_to].name))
            : readable_bytes(tensor.num_bytes));
  }
  return out;
}

std::string checkpoint_json(const CheckpointReader& checkpoint) {
  using Json = nlohmann::ordered_json;
  const auto dump = [](const Json& value) {
    return value.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  Json metadata = Json::object();
  for (const auto& [name, value] : checkpoint.metadata()) {
    metadata[name] = value;
  }
  std::string out =
      absl::StrCat("{\"path\": ", dump(checkpoint.path()),
                   ",\n \"format\": ", dump(checkpoint.format()),
                   ",\n \"num_tensors\": ", checkpoint.tensors().size(),
                   ",\n \"num_bytes\": ", total_bytes(checkpoint),
                   ",\n \"metadata\": ", dump(metadata), ",\n \"tensors\": [");
  const char* separator = "\n  ";
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    Json entry = {{"name", tensor.name},
                  {"dtype", tensor.dtype},
                  {"shape", tensor.sizes},
                  {"num_bytes", tensor.num_bytes}};
    if (tensor.tied_to.has_value()) {
      entry["tied_to"] = checkpoint.tensors()[*tensor.tied_to].name;
    }
    absl::StrAppend(&out, separator, dump(entry));
    separator = ",\n  ";
  }
  return out + "]}\n";
}

}  // namespace fullshard
