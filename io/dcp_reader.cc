#include "fullshard/io/dcp_reader.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/pickle_reader.h"
#include "fullshard/io/zip_reader.h"

namespace fullshard {
namespace {

using Bytes = absl::string_view;
using Sizes = std::vector<int64_t>;
using Tensor = ShardedManifest::Tensor;
using Piece = ShardedManifest::Piece;

absl::Status malformed(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("malformed .metadata: ", what));
}

// The attribute of an object; an error if it is not there or of another kind.
absl::StatusOr<PtValue> attribute(const PtValue& object, const char* name) {
  if (object.kind() == PtKind::kObject) {
    const std::optional<PtValue> state = object.state();
    if (state.has_value() && state->is_dict()) {
      if (std::optional<PtValue> found = state->find(name)) return *found;
    }
  }
  return malformed(absl::StrCat("'", name, "' is missing"));
}

absl::StatusOr<int64_t> integer(const PtValue& object, const char* name) {
  FS_ASSIGN_OR_RETURN(const PtValue value, attribute(object, name));
  if (value.kind() == PtKind::kInt && value.as_int() >= 0) {
    return value.as_int();
  }
  return malformed(absl::StrCat("'", name, "' is no size"));
}

absl::StatusOr<std::string> text(const PtValue& object, const char* name) {
  FS_ASSIGN_OR_RETURN(const PtValue value, attribute(object, name));
  if (value.kind() == PtKind::kString) return value.as_string();
  return malformed(absl::StrCat("'", name, "' is no string"));
}

absl::StatusOr<Sizes> sizes(const PtValue& object, const char* name) {
  FS_ASSIGN_OR_RETURN(const PtValue value, attribute(object, name));
  if (value.kind() != PtKind::kSize) {
    return malformed(absl::StrCat("'", name, "' is no torch.Size"));
  }
  Sizes result;
  for (size_t i = 0; i < value.size(); ++i) {
    result.push_back(value.item(i).as_int());
  }
  return result;
}

bool is_object(const PtValue& value, const char* name) {
  return value.kind() == PtKind::kObject && value.class_name() == name;
}

// Where one chunk of a tensor is saved.
struct Item {
  std::string file;
  int64_t offset = 0;
  int64_t num_bytes = 0;
};

// A part of a tensor, with the strides of its elements.
struct Chunk {
  TensorBox box;
  Piece piece;
  Sizes strides;
};

class DcpReader {
 public:
  explicit DcpReader(std::string folder) : folder_(std::move(folder)) {}

  absl::StatusOr<ShardedManifest> read() {
    FS_ASSIGN_OR_RETURN(const std::shared_ptr<MappedFile> file,
                        MappedFile::open(folder_ + "/.metadata"));
    FS_ASSIGN_OR_RETURN(const PtValue root,
                        read_dcp_pickle(std::string(file->bytes())));
    if (!is_object(root, "Metadata")) return malformed("no Metadata");
    FS_ASSIGN_OR_RETURN(const PtValue items, attribute(root, "storage_data"));
    FS_RETURN_IF_ERROR(read_items(items));
    FS_ASSIGN_OR_RETURN(const PtValue planner, attribute(root, "planner_data"));
    FS_ASSIGN_OR_RETURN(const PtValue tensors,
                        attribute(root, "state_dict_metadata"));
    if (!tensors.is_dict()) return malformed("'state_dict_metadata'");
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors.key(i).kind() != PtKind::kString) {
        return malformed("a name is no string");
      }
      const std::string name = tensors.key(i).as_string();
      if (!is_object(tensors.item(i), "TensorStorageMetadata")) continue;
      const absl::Status status = add_tensor(name, planner, tensors.item(i));
      FS_RETURN_IF_ERROR(annotate(status, absl::StrCat("'", name, "'")));
    }
    return std::move(manifest_);
  }

 private:
  absl::Status read_items(const PtValue& items) {
    if (!items.is_dict()) return malformed("'storage_data'");
    for (size_t i = 0; i < items.size(); ++i) {
      const PtValue index = items.key(i), info = items.item(i);
      if (!is_object(index, "MetadataIndex") ||
          !is_object(info, "_StorageInfo")) {
        return malformed("'storage_data'");
      }
      FS_ASSIGN_OR_RETURN(const std::string name, text(index, "fqn"));
      // What is no tensor has none.
      const auto offset = attribute(index, "offset");
      if (!offset.ok() || offset->kind() != PtKind::kSize) continue;
      FS_ASSIGN_OR_RETURN(const Sizes place, sizes(index, "offset"));
      Item item;
      FS_ASSIGN_OR_RETURN(item.file, text(info, "relative_path"));
      FS_ASSIGN_OR_RETURN(item.offset, integer(info, "offset"));
      FS_ASSIGN_OR_RETURN(item.num_bytes, integer(info, "length"));
      const auto transforms = info.state()->find("transform_descriptors");
      if (transforms.has_value() && transforms->kind() != PtKind::kNone &&
          transforms->size() > 0) {
        return absl::UnimplementedError(
            "transformed (compressed) storage, expected plain");
      }
      items_[{name, place}] = std::move(item);
    }
    return absl::OkStatus();
  }

  absl::Status add_tensor(const std::string& name, const PtValue& planner,
                          const PtValue& metadata) {
    Tensor tensor;
    tensor.path = path_of(name, planner);
    FS_ASSIGN_OR_RETURN(tensor.sizes, sizes(metadata, "size"));
    FS_ASSIGN_OR_RETURN(const PtValue properties,
                        attribute(metadata, "properties"));
    const std::optional<PtValue> state = properties.kind() == PtKind::kObject
                                             ? properties.state()
                                             : std::nullopt;
    if (!state.has_value() || state->kind() != PtKind::kTuple ||
        state->size() == 0 || state->item(0).kind() != PtKind::kDtype) {
      return malformed("no dtype");
    }
    tensor.dtype = state->item(0).as_dtype();
    FS_ASSIGN_OR_RETURN(const PtValue chunks, attribute(metadata, "chunks"));
    if (chunks.kind() != PtKind::kList) return malformed("'chunks'");
    std::vector<Chunk> found;
    for (size_t i = 0; i < chunks.size(); ++i) {
      TensorBox box;
      FS_ASSIGN_OR_RETURN(box.offsets, sizes(chunks.item(i), "offsets"));
      FS_ASSIGN_OR_RETURN(box.sizes, sizes(chunks.item(i), "sizes"));
      FS_RETURN_IF_ERROR(check_box(tensor, &box));
      if (box.numel == 0) continue;
      FS_ASSIGN_OR_RETURN(found.emplace_back(),
                          find_chunk(name, std::move(box), tensor));
    }
    tensor.order = common_order(tensor, found);
    for (const Chunk& chunk : found) {
      FS_RETURN_IF_ERROR(add_runs(chunk, tensor));
    }
    manifest_.tensors.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  static std::vector<std::string> path_of(const std::string& name,
                                          const PtValue& planner) {
    std::vector<std::string> path;
    const std::optional<PtValue> keys =
        planner.is_dict() ? planner.find(name) : std::nullopt;
    if (keys.has_value() && keys->kind() == PtKind::kTuple) {
      for (size_t i = 0; i < keys->size(); ++i) {
        const PtValue key = keys->item(i);
        if (key.kind() == PtKind::kString) path.push_back(key.as_string());
        if (key.kind() == PtKind::kInt) {
          path.push_back(absl::StrCat(key.as_int()));
        }
      }
    }
    if (flat_name(path) != name) path = {name};
    return path;
  }

  // Also counts the box's elements.
  static absl::Status check_box(const Tensor& tensor, TensorBox* box) {
    bool fits = box->offsets.size() == tensor.sizes.size() &&
                box->sizes.size() == tensor.sizes.size();
    box->numel = 1;
    for (size_t i = 0; fits && i < tensor.sizes.size(); ++i) {
      fits = box->sizes[i] <= tensor.sizes[i] &&
             box->offsets[i] <= tensor.sizes[i] - box->sizes[i] &&
             !__builtin_mul_overflow(box->numel, box->sizes[i], &box->numel);
    }
    return fits ? absl::OkStatus() : malformed("a chunk outside of its tensor");
  }

  // The order in memory of the first chunk that is not row-major.
  static Sizes common_order(const Tensor& tensor,
                            const std::vector<Chunk>& chunks) {
    Sizes row_major;
    for (size_t i = 0; i < tensor.sizes.size(); ++i) {
      row_major.push_back(static_cast<int64_t>(i));
    }
    for (const Chunk& chunk : chunks) {
      Sizes order = memory_order(chunk.box.sizes, chunk.strides);
      if (order != row_major) return order;
    }
    return row_major;
  }

  absl::StatusOr<Chunk> find_chunk(const std::string& name, TensorBox box,
                                   const Tensor& tensor) {
    const auto item = items_.find({name, box.offsets});
    if (item == items_.end()) return malformed("a chunk is saved nowhere");
    Chunk chunk;
    FS_ASSIGN_OR_RETURN(chunk.piece.file, open_file(item->second.file));
    chunk.piece.item_offset = item->second.offset;
    chunk.piece.item_bytes = item->second.num_bytes;
    chunk.box = std::move(box);
    FS_RETURN_IF_ERROR(
        annotate(find_data(tensor, item->second, &chunk), item->second.file));
    return chunk;
  }

  // Rows of the chunk that are ranges of the tensor become its pieces.
  static absl::Status add_runs(const Chunk& chunk, Tensor& tensor) {
    const TensorBox& box = chunk.box;
    const Sizes dense = strides_of(box.sizes, tensor.order);
    for (size_t i = 0; i < dense.size(); ++i) {
      if (box.sizes[i] == 1 || chunk.strides[i] == dense[i]) continue;
      return absl::UnimplementedError(
          "chunks whose dimensions lie in memory in different orders");
    }
    const Sizes strides = strides_of(tensor.sizes, tensor.order);
    // Dimensions from `inner` on, in memory order, form one range.
    size_t inner = tensor.order.size();
    int64_t run = 1;
    while (inner > 0) {
      const auto dim = static_cast<size_t>(tensor.order[--inner]);
      run *= box.sizes[dim];
      if (box.sizes[dim] != tensor.sizes[dim]) break;
    }
    const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    Piece piece = chunk.piece;
    piece.numel = run;
    Sizes index(box.sizes.size(), 0);
    for (int64_t done = 0; done < box.numel; done += run) {
      piece.begin = 0;
      for (size_t i = 0; i < index.size(); ++i) {
        piece.begin += (box.offsets[i] + index[i]) * strides[i];
      }
      tensor.pieces.push_back(piece);
      piece.data_offset += run * element;
      for (size_t i = inner; i-- > 0;) {
        const auto dim = static_cast<size_t>(tensor.order[i]);
        if (++index[dim] < box.sizes[dim]) break;
        index[dim] = 0;
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> open_file(const std::string& name) {
    if (name.empty() || name[0] == '.' || absl::StrContains(name, "/")) {
      return malformed(absl::StrCat("file name '", name, "'"));
    }
    const auto found = file_index_.find(name);
    if (found != file_index_.end()) return found->second;
    FS_ASSIGN_OR_RETURN(auto file, MappedFile::open(folder_ + "/" + name));
    const auto index = static_cast<int64_t>(files_.size());
    manifest_.files.push_back({name, static_cast<int64_t>(file->size())});
    files_.push_back(std::move(file));
    file_index_[name] = index;
    return index;
  }

  // Finds a chunk's bytes in the archive around them.
  absl::Status find_data(const Tensor& tensor, const Item& item, Chunk* chunk) {
    Piece* const piece = &chunk->piece;
    const Bytes whole = files_[static_cast<size_t>(piece->file)]->bytes();
    if (item.num_bytes > static_cast<int64_t>(whole.size()) ||
        item.offset > static_cast<int64_t>(whole.size()) - item.num_bytes) {
      return absl::DataLossError("the file is cut short");
    }
    const Bytes bytes = whole.substr(static_cast<size_t>(item.offset),
                                     static_cast<size_t>(item.num_bytes));
    if (!absl::StartsWith(bytes, "PK")) {
      return absl::UnimplementedError(
          "a chunk that is no archive of torch.save");
    }
    FS_ASSIGN_OR_RETURN(const ZipReader zip, ZipReader::open(bytes));
    std::string prefix;
    for (const ZipReader::Entry& entry : zip.entries()) {
      Bytes name = entry.name;
      if (absl::ConsumeSuffix(&name, "data.pkl")) prefix = std::string(name);
    }
    const ZipReader::Entry* const pickle = zip.find(prefix + "data.pkl");
    if (pickle == nullptr) return malformed("a chunk without data.pkl");
    FS_RETURN_IF_ERROR(zip.verify(*pickle));
    FS_ASSIGN_OR_RETURN(const Bytes pickled, zip.data(*pickle));
    FS_ASSIGN_OR_RETURN(const PtValue value, read_pickle(std::string(pickled)));
    if (!value.is_tensor()) return malformed("a chunk that is no tensor");
    const PickledTensor saved = value.as_tensor();
    if (saved.dtype != tensor.dtype || saved.sizes != chunk->box.sizes) {
      return malformed("a chunk's dtype or shape differs");
    }
    const ZipReader::Entry* const data =
        zip.find(absl::StrCat(prefix, "data/", saved.storage_key));
    if (data == nullptr) return malformed("a chunk without data");
    FS_ASSIGN_OR_RETURN(const Bytes storage, zip.data(*data));
    if (static_cast<int64_t>(storage.size()) < saved.storage_bytes) {
      return malformed("a chunk's data is cut short");
    }
    piece->data_offset =
        (storage.data() - whole.data()) +
        saved.storage_offset *
            static_cast<int64_t>(c10::elementSize(saved.dtype));
    chunk->strides = saved.strides;
    return absl::OkStatus();
  }

  const std::string folder_;
  ShardedManifest manifest_;
  std::map<std::pair<std::string, Sizes>, Item> items_;
  std::vector<std::shared_ptr<MappedFile>> files_;
  std::map<std::string, int64_t> file_index_;
};

}  // namespace

absl::StatusOr<ShardedManifest> read_dcp_metadata(const std::string& folder) {
  absl::StatusOr<ShardedManifest> manifest = DcpReader(folder).read();
  if (!manifest.ok()) return annotate(manifest.status(), folder);
  return manifest;
}

}  // namespace fullshard
