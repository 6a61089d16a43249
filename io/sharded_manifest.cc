#include "fullshard/io/sharded_manifest.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
#include "fullshard/io/dtype_names.h"
#include "fullshard/io/json_scanner.h"

namespace fullshard {
namespace {

using Piece = ShardedManifest::Piece;
using Tensor = ShardedManifest::Tensor;

constexpr char kFormat[] = "fullshard-sharded";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxDims = 64;

// --- writing

std::string json_integers(const std::vector<int64_t>& values) {
  return absl::StrCat("[", absl::StrJoin(values, ","), "]");
}

std::string json_path(const std::vector<std::string>& path) {
  return absl::StrCat(
      "[",
      absl::StrJoin(path, ",",
                    [](std::string* out, const std::string& key) {
                      absl::StrAppend(out, json_string(key));
                    }),
      "]");
}

void append_piece(const Piece& piece, std::string* out) {
  absl::StrAppend(out, "{\"file\":", piece.file,
                  ",\"data_offset\":", piece.data_offset,
                  ",\"begin\":", piece.begin, ",\"numel\":", piece.numel,
                  ",\"item_offset\":", piece.item_offset,
                  ",\"item_bytes\":", piece.item_bytes,
                  ",\"crc32\":", json_integers(piece.crc32), "}");
}

void append_tensor(const Tensor& tensor, std::string* out) {
  absl::StrAppend(out, "{\"path\":", json_path(tensor.path));
  if (!tensor.aliases.empty()) {
    absl::StrAppend(out, ",\"aliases\":[",
                    absl::StrJoin(tensor.aliases, ",",
                                  [](std::string* text, const auto& path) {
                                    absl::StrAppend(text, json_path(path));
                                  }),
                    "]");
  }
  absl::StrAppend(out, ",\"dtype\":\"", find_dtype(tensor.dtype)->name,
                  "\",\"shape\":", json_integers(tensor.sizes),
                  ",\"order\":", json_integers(tensor.order), ",\"pieces\":[");
  for (size_t i = 0; i < tensor.pieces.size(); ++i) {
    absl::StrAppend(out, i == 0 ? "" : ",");
    append_piece(tensor.pieces[i], out);
  }
  absl::StrAppend(out, "]}");
}

// --- reading

absl::Status malformed(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("malformed manifest: ", what));
}

// Calls `element()` at each element of an array; it consumes the element.
template <class F>
absl::Status read_array(JsonScanner& json, F element) {
  FS_RETURN_IF_ERROR(json.expect('['));
  if (json.accept(']')) return absl::OkStatus();
  do {
    FS_RETURN_IF_ERROR(element());
  } while (json.accept(','));
  return json.expect(']');
}

absl::StatusOr<std::string> read_string(JsonScanner& json) {
  FS_ASSIGN_OR_RETURN(const absl::string_view raw, json.string());
  return decode_json_string(raw);
}

absl::StatusOr<std::vector<int64_t>> read_integers(JsonScanner& json) {
  std::vector<int64_t> values;
  FS_RETURN_IF_ERROR(read_array(json, [&]() -> absl::Status {
    FS_ASSIGN_OR_RETURN(values.emplace_back(), json.integer());
    return absl::OkStatus();
  }));
  return values;
}

absl::StatusOr<std::vector<std::string>> read_path(JsonScanner& json) {
  std::vector<std::string> path;
  FS_RETURN_IF_ERROR(read_array(json, [&]() -> absl::Status {
    FS_ASSIGN_OR_RETURN(path.emplace_back(), read_string(json));
    return absl::OkStatus();
  }));
  if (path.empty()) return malformed("a tensor without a name");
  return path;
}

absl::StatusOr<Piece> read_piece(JsonScanner& json) {
  Piece piece;
  FS_RETURN_IF_ERROR(json.object([&](absl::string_view key) -> absl::Status {
    if (key == "crc32") {
      FS_ASSIGN_OR_RETURN(piece.crc32, read_integers(json));
      return absl::OkStatus();
    }
    int64_t* const field = key == "file"          ? &piece.file
                           : key == "data_offset" ? &piece.data_offset
                           : key == "begin"       ? &piece.begin
                           : key == "numel"       ? &piece.numel
                           : key == "item_offset" ? &piece.item_offset
                           : key == "item_bytes"  ? &piece.item_bytes
                                                  : nullptr;
    if (field == nullptr) return json.skip_value().status();
    FS_ASSIGN_OR_RETURN(*field, json.integer());
    return absl::OkStatus();
  }));
  return piece;
}

absl::StatusOr<Tensor> read_tensor(JsonScanner& json) {
  Tensor tensor;
  FS_RETURN_IF_ERROR(json.object([&](absl::string_view key) -> absl::Status {
    if (key == "path") {
      FS_ASSIGN_OR_RETURN(tensor.path, read_path(json));
    } else if (key == "aliases") {
      return read_array(json, [&]() -> absl::Status {
        FS_ASSIGN_OR_RETURN(tensor.aliases.emplace_back(), read_path(json));
        return absl::OkStatus();
      });
    } else if (key == "dtype") {
      FS_ASSIGN_OR_RETURN(const std::string name, read_string(json));
      const DtypeName* const dtype = find_dtype(absl::string_view(name));
      if (dtype == nullptr) {
        return malformed(absl::StrCat("unknown dtype '", name, "'"));
      }
      tensor.dtype = dtype->dtype;
    } else if (key == "shape") {
      FS_ASSIGN_OR_RETURN(tensor.sizes, read_integers(json));
    } else if (key == "order") {
      FS_ASSIGN_OR_RETURN(tensor.order, read_integers(json));
    } else if (key == "pieces") {
      return read_array(json, [&]() -> absl::Status {
        FS_ASSIGN_OR_RETURN(tensor.pieces.emplace_back(), read_piece(json));
        return absl::OkStatus();
      });
    } else {
      return json.skip_value().status();
    }
    return absl::OkStatus();
  }));
  return tensor;
}

bool is_permutation(const std::vector<int64_t>& order, size_t size) {
  std::vector<bool> seen(size);
  for (const int64_t dim : order) {
    if (dim < 0 || static_cast<size_t>(dim) >= size ||
        seen[static_cast<size_t>(dim)]) {
      return false;
    }
    seen[static_cast<size_t>(dim)] = true;
  }
  return order.size() == size;
}

// So that no product or sum below overflows.
absl::Status check_shape(const Tensor& tensor) {
  if (tensor.path.empty()) return malformed("a tensor without a name");
  if (tensor.sizes.size() > kMaxDims ||
      !is_permutation(tensor.order, tensor.sizes.size())) {
    return malformed(
        absl::StrCat("'", tensor.name(), "': shape and order do not fit"));
  }
  auto num_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (const int64_t size : tensor.sizes) {
    if (size > 0 && __builtin_mul_overflow(num_bytes, size, &num_bytes)) {
      return malformed(absl::StrCat("'", tensor.name(), "' is too large"));
    }
  }
  return absl::OkStatus();
}

absl::Status check_pieces(const ShardedManifest& manifest,
                          const Tensor& tensor) {
  const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t numel = tensor.numel();
  for (const Piece& piece : tensor.pieces) {
    const bool has_file =
        piece.file < static_cast<int64_t>(manifest.files.size());
    const bool in_tensor =
        piece.numel <= numel && piece.begin <= numel - piece.numel;
    if (!has_file || !in_tensor) {
      return malformed(absl::StrCat("'", tensor.name(),
                                    "': a piece lies outside of the tensor or "
                                    "in no file"));
    }
    const int64_t num_bytes = piece.numel * element;
    const int64_t file_bytes =
        manifest.files[static_cast<size_t>(piece.file)].num_bytes;
    const bool in_file = num_bytes <= file_bytes &&
                         piece.data_offset <= file_bytes - num_bytes &&
                         piece.item_bytes <= file_bytes &&
                         piece.item_offset <= file_bytes - piece.item_bytes;
    const int64_t num_blocks = (num_bytes + ShardedManifest::kBlockBytes - 1) /
                               ShardedManifest::kBlockBytes;
    if (!in_file || static_cast<int64_t>(piece.crc32.size()) != num_blocks) {
      return malformed(absl::StrCat("'", tensor.name(),
                                    "': a piece does not fit its file or its "
                                    "checksums"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string flat_name(const std::vector<std::string>& path) {
  return absl::StrJoin(path, ".");
}

std::string ShardedManifest::Tensor::name() const { return flat_name(path); }

int64_t ShardedManifest::Tensor::numel() const {
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;
    numel *= size;
  }
  return numel;
}

std::string ShardedManifest::to_json() const {
  std::string out =
      absl::StrCat("{\"format\":\"", kFormat, "\",\"version\":", kVersion,
                   ",\n\"world_size\":", world_size, ",\n\"state\":{");
  const char* separator = "\n";
  for (const auto& [key, value] : state) {
    absl::StrAppend(&out, separator, json_string(key), ":", json_string(value));
    separator = ",\n";
  }
  absl::StrAppend(&out, "},\n\"files\":[");
  separator = "\n";
  for (const File& file : files) {
    absl::StrAppend(&out, separator, "{\"name\":", json_string(file.name),
                    ",\"bytes\":", file.num_bytes, "}");
    separator = ",\n";
  }
  absl::StrAppend(&out, "],\n\"tensors\":[");
  separator = "\n";
  for (const Tensor& tensor : tensors) {
    absl::StrAppend(&out, separator);
    append_tensor(tensor, &out);
    separator = ",\n";
  }
  absl::StrAppend(&out, "]}\n");
  return out;
}

absl::StatusOr<ShardedManifest> ShardedManifest::parse(absl::string_view text) {
  ShardedManifest manifest;
  JsonScanner json(text);
  std::string format;
  int64_t version = 0;
  FS_RETURN_IF_ERROR(json.object([&](absl::string_view key) -> absl::Status {
    if (key == "format") {
      FS_ASSIGN_OR_RETURN(format, read_string(json));
    } else if (key == "version") {
      FS_ASSIGN_OR_RETURN(version, json.integer());
    } else if (key == "world_size") {
      FS_ASSIGN_OR_RETURN(manifest.world_size, json.integer());
    } else if (key == "state") {
      return json.object([&](absl::string_view raw) -> absl::Status {
        FS_ASSIGN_OR_RETURN(const std::string name, decode_json_string(raw));
        FS_ASSIGN_OR_RETURN(manifest.state[name], read_string(json));
        return absl::OkStatus();
      });
    } else if (key == "files") {
      return read_array(json, [&]() -> absl::Status {
        File& file = manifest.files.emplace_back();
        return json.object([&](absl::string_view field) -> absl::Status {
          if (field == "name") {
            FS_ASSIGN_OR_RETURN(file.name, read_string(json));
          } else if (field == "bytes") {
            FS_ASSIGN_OR_RETURN(file.num_bytes, json.integer());
          } else {
            return json.skip_value().status();
          }
          return absl::OkStatus();
        });
      });
    } else if (key == "tensors") {
      return read_array(json, [&]() -> absl::Status {
        FS_ASSIGN_OR_RETURN(manifest.tensors.emplace_back(), read_tensor(json));
        return absl::OkStatus();
      });
    } else {
      return json.skip_value().status();
    }
    return absl::OkStatus();
  }));
  FS_RETURN_IF_ERROR(json.end());
  if (format != kFormat || version != kVersion) {
    return absl::DataLossError(absl::StrCat("expected format ", kFormat,
                                            " version ", kVersion, ", got '",
                                            format, "' version ", version));
  }
  for (const File& file : manifest.files) {
    // A name must stay inside the folder.
    if (file.name.empty() || file.name[0] == '.' ||
        file.name.find('/') != std::string::npos) {
      return malformed(absl::StrCat("file name '", file.name, "'"));
    }
  }
  for (const Tensor& tensor : manifest.tensors) {
    FS_RETURN_IF_ERROR(check_shape(tensor));
    FS_RETURN_IF_ERROR(check_pieces(manifest, tensor));
  }
  return manifest;
}

absl::Status ShardedManifest::merge(const ShardedManifest& other) {
  const auto first_file = static_cast<int64_t>(files.size());
  files.insert(files.end(), other.files.begin(), other.files.end());
  std::unordered_map<std::string, size_t> place;
  for (size_t i = 0; i < tensors.size(); ++i) place[tensors[i].name()] = i;
  for (const Tensor& theirs : other.tensors) {
    const auto [found, is_new] = place.emplace(theirs.name(), tensors.size());
    if (is_new) {
      tensors.push_back(theirs);
      tensors.back().pieces.clear();
    }
    Tensor& ours = tensors[found->second];
    if (ours.dtype != theirs.dtype || ours.sizes != theirs.sizes ||
        ours.order != theirs.order) {
      return absl::DataLossError(absl::StrCat(
          "the ranks disagree on the shape or dtype of '", ours.name(), "'"));
    }
    for (Piece piece : theirs.pieces) {
      piece.file += first_file;
      ours.pieces.push_back(std::move(piece));
    }
  }
  return absl::OkStatus();
}

absl::Status ShardedManifest::check_complete() {
  for (Tensor& tensor : tensors) {
    std::sort(tensor.pieces.begin(), tensor.pieces.end(),
              [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    int64_t end = 0;
    for (const Piece& piece : tensor.pieces) {
      if (piece.begin != end) break;
      end += piece.numel;
    }
    int64_t total = 0;
    for (const Piece& piece : tensor.pieces) total += piece.numel;
    if (end != tensor.numel() || total != end) {
      return absl::DataLossError(
          absl::StrCat("'", tensor.name(), "': expected ", tensor.numel(),
                       " elements, each once; the pieces hold ", total,
                       ", without a gap up to ", end));
    }
  }
  return absl::OkStatus();
}

namespace {

// Splits elements [from, to) of the slice of a tensor that starts at element
// `start` and in which the dimensions before `depth`, in memory order, are
// fixed in `box`.
void split_slice(const std::vector<int64_t>& order,
                 const std::vector<int64_t>& strides, size_t depth,
                 int64_t start, int64_t from, int64_t to, TensorBox box,
                 std::vector<TensorBox>& boxes) {
  if (from >= to) return;
  const size_t dim =
      depth < order.size() ? static_cast<size_t>(order[depth]) : 0;
  const int64_t row = depth < order.size() ? strides[dim] : 1;
  const int64_t first = (from - start) / row, last = (to - 1 - start) / row;
  const bool whole_rows = (from - start) % row == 0 && (to - start) % row == 0;
  if (depth == order.size() || whole_rows) {
    if (depth < order.size()) {
      box.offsets[dim] = first;
      box.sizes[dim] = last - first + 1;
    }
    box.begin = from;
    box.numel = to - from;
    boxes.push_back(std::move(box));
    return;
  }
  const auto split_row = [&](int64_t index, int64_t row_from, int64_t row_to) {
    TensorBox inner = box;
    inner.offsets[dim] = index;
    inner.sizes[dim] = 1;
    split_slice(order, strides, depth + 1, start + index * row, row_from,
                row_to, std::move(inner), boxes);
  };
  if (first == last) return split_row(first, from, to);
  const int64_t middle_from = (from - start + row - 1) / row * row + start;
  const int64_t middle_to = (to - start) / row * row + start;
  if (from < middle_from) split_row(first, from, middle_from);
  split_slice(order, strides, depth, start, middle_from, middle_to, box, boxes);
  if (middle_to < to) split_row(last, middle_to, to);
}

}  // namespace

std::vector<TensorBox> split_into_boxes(const std::vector<int64_t>& sizes,
                                        const std::vector<int64_t>& order,
                                        int64_t begin, int64_t numel) {
  TensorBox box;
  box.offsets.assign(sizes.size(), 0);
  box.sizes = sizes;
  std::vector<TensorBox> boxes;
  split_slice(order, strides_of(sizes, order), 0, 0, begin, begin + numel,
              std::move(box), boxes);
  return boxes;
}

}  // namespace fullshard
