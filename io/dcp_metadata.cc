#include "fullshard/io/dcp_metadata.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "fullshard/io/dtype_names.h"
#include "fullshard/io/pickle_writer.h"

namespace fullshard {
namespace {

constexpr char kModule[] = "torch.distributed.checkpoint.metadata\n";

class MetadataPickle {
 public:
  MetadataPickle(const ShardedManifest& manifest,
                 const std::vector<DcpObject>& objects)
      : manifest_(manifest), objects_(objects) {}

  std::string write() {
    begin_object("Metadata");
    out_.string("state_dict_metadata");
    out_.begin_dict();
    for_each_name([&](const auto& path, const auto& tensor) {
      out_.string(flat_name(path));
      storage_metadata(tensor);
    });
    for (const DcpObject& object : objects_) {
      out_.string(name_of(object));
      begin_object("BytesStorageMetadata");
      end_object();
    }
    out_.end_dict();
    out_.string("planner_data");
    out_.begin_dict();
    for_each_name([&](const auto& path, const auto&) {
      out_.string(flat_name(path));
      out_.begin_tuple();
      for (const std::string& key : path) out_.string(key);
      out_.end_tuple();
    });
    for (const DcpObject& object : objects_) path(object);
    out_.end_dict();
    out_.string("storage_data");
    out_.begin_dict();
    for_each_name([&](const auto& path, const auto& tensor) {
      storage_data(flat_name(path), tensor);
    });
    for (const DcpObject& object : objects_) {
      begin_object("MetadataIndex");
      out_.string("fqn");
      out_.string(name_of(object));
      out_.string("offset");
      out_.none();
      out_.string("index");
      out_.none();
      end_object();
      storage_info(object.file_name, object.item_offset, object.item_bytes);
    }
    out_.end_dict();
    out_.string("storage_meta");
    out_.none();
    out_.string("version");
    out_.none();
    end_object();
    return out_.finish();
  }

 private:
  using Tensor = ShardedManifest::Tensor;

  template <class F>
  void for_each_name(F f) {
    for (const Tensor& tensor : manifest_.tensors) {
      f(tensor.path, tensor);
      for (const auto& alias : tensor.aliases) f(alias, tensor);
    }
  }

  // An object whose state is a dict of its fields.
  void begin_object(const char* name) {
    out_.new_object(absl::StrCat(kModule, name));
    out_.begin_dict();
  }
  void end_object() {
    out_.end_dict();
    out_.build();
  }

  void size(const std::vector<int64_t>& values) {
    out_.global("torch\nSize");
    out_.begin_tuple();  // Size takes one argument, a tuple.
    out_.begin_tuple();
    out_.integers(values);
    out_.end_tuple();
    out_.end_tuple();
    out_.reduce();
  }

  static std::vector<TensorBox> boxes(const Tensor& tensor) {
    std::vector<TensorBox> all;
    for (const ShardedManifest::Piece& piece : tensor.pieces) {
      all.push_back(split_into_boxes(tensor.sizes, tensor.order, piece.begin,
                                     piece.numel)[0]);
    }
    return all;
  }

  void storage_metadata(const Tensor& tensor) {
    begin_object("TensorStorageMetadata");
    out_.string("properties");
    out_.new_object(absl::StrCat(kModule, "TensorProperties"));
    out_.begin_tuple();
    out_.global(absl::StrCat("torch\n", find_dtype(tensor.dtype)->name));
    out_.global("torch.serialization\n_get_layout");
    out_.begin_tuple();
    out_.string("torch.strided");
    out_.end_tuple();
    out_.reduce();
    out_.boolean(false);  // requires_grad
    out_.global(absl::StrCat(kModule, "_MEM_FORMAT_ENCODING"));
    out_.begin_tuple();
    out_.integer(0);  // contiguous
    out_.end_tuple();
    out_.reduce();
    out_.boolean(false);  // pin_memory
    out_.end_tuple();
    out_.build();
    out_.string("size");
    size(tensor.sizes);
    out_.string("chunks");
    out_.begin_list();
    for (const TensorBox& box : boxes(tensor)) {
      begin_object("ChunkStorageMetadata");
      out_.string("offsets");
      size(box.offsets);
      out_.string("sizes");
      size(box.sizes);
      end_object();
    }
    out_.end_list();
    end_object();
  }

  void storage_data(const std::string& name, const Tensor& tensor) {
    const std::vector<TensorBox> all = boxes(tensor);
    for (size_t i = 0; i < all.size(); ++i) {
      const ShardedManifest::Piece& piece = tensor.pieces[i];
      begin_object("MetadataIndex");
      out_.string("fqn");
      out_.string(name);
      out_.string("offset");
      size(all[i].offsets);
      out_.string("index");
      out_.integer(static_cast<int64_t>(i));
      end_object();
      storage_info(manifest_.files[static_cast<size_t>(piece.file)].name,
                   piece.item_offset, piece.item_bytes);
    }
  }

  void storage_info(const std::string& file_name, int64_t offset,
                    int64_t num_bytes) {
    out_.new_object("torch.distributed.checkpoint.filesystem\n_StorageInfo");
    out_.begin_dict();
    out_.string("relative_path");
    out_.string(file_name);
    out_.string("offset");
    out_.integer(offset);
    out_.string("length");
    out_.integer(num_bytes);
    end_object();
  }

  static std::string name_of(const DcpObject& object) {
    return absl::StrJoin(
        object.path, ".", [](std::string* out, const DcpObject::Key& key) {
          std::visit([&](const auto& k) { absl::StrAppend(out, k); }, key);
        });
  }

  void path(const DcpObject& object) {
    out_.string(name_of(object));
    out_.begin_tuple();
    for (const DcpObject::Key& key : object.path) {
      if (const auto* text = std::get_if<std::string>(&key)) {
        out_.string(*text);
      } else {
        out_.integer(std::get<int64_t>(key));
      }
    }
    out_.end_tuple();
  }

  const ShardedManifest& manifest_;
  const std::vector<DcpObject>& objects_;
  PickleWriter out_;
};

}  // namespace

std::string dcp_metadata(const ShardedManifest& manifest,
                         const std::vector<DcpObject>& objects) {
  return MetadataPickle(manifest, objects).write();
}

}  // namespace fullshard
