#ifndef FULLSHARD_IO_SHARDED_MANIFEST_H_
#define FULLSHARD_IO_SHARDED_MANIFEST_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fullshard {

// What a sharded checkpoint holds and where, as manifest.json says it.
// Elements are counted in the tensor's memory order: row-major after its
// dimensions were permuted to `order`, outermost first.
struct ShardedManifest {
  // Checksums are those of blocks of this size, the last one shorter.
  static constexpr int64_t kBlockBytes = int64_t{1} << 20;

  struct File {
    std::string name;
    int64_t num_bytes = 0;
  };
  // A range of elements, which is a box of the tensor too.
  struct Piece {
    int64_t file = 0;         // Into `files`.
    int64_t data_offset = 0;  // Of the elements' bytes, in the file.
    int64_t begin = 0;        // First element,
    int64_t numel = 0;        // and how many.
    // The small .pt archive around the bytes, for Python.
    int64_t item_offset = 0;
    int64_t item_bytes = 0;
    std::vector<int64_t> crc32;  // By block.
  };
  struct Tensor {
    // Keys of nested dicts, as {"model", "layers.0.weight"}; the tensor's name
    // is these joined by dots.
    std::vector<std::string> path;
    std::vector<std::vector<std::string>> aliases;  // Further paths.
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> sizes;
    std::vector<int64_t> order;
    std::vector<Piece> pieces;  // By first element, in a whole checkpoint.

    std::string name() const;
    int64_t numel() const;
  };

  int64_t world_size = 0;
  std::vector<File> files;
  std::map<std::string, std::string> state;  // Step, epoch and the like.
  std::vector<Tensor> tensors;

  std::string to_json() const;
  // Errors: DataLoss for what is malformed, or refers to what is not there.
  static absl::StatusOr<ShardedManifest> parse(absl::string_view json);

  // Adds the files and pieces of another rank's.
  // Errors: DataLoss if the ranks disagree on a tensor.
  absl::Status merge(const ShardedManifest& other);
  // Sorts pieces. Errors: DataLoss naming a tensor that has gaps, or elements
  // twice.
  absl::Status check_complete();
};

// The manifest's name in a checkpoint's folder.
inline constexpr char kManifestName[] = "manifest.json";

// Joins keys as DCP does: {"model", "a.b"} is "model.a.b".
std::string flat_name(const std::vector<std::string>& path);

// A box of a tensor: `offsets` and `sizes` by dimension.
struct TensorBox {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  int64_t begin = 0;  // In memory order.
  int64_t numel = 0;
};
// Splits the elements [begin, begin + numel) of a tensor into boxes that are
// ranges in memory: at most 2 (ndim - 1) + 1.
std::vector<TensorBox> split_into_boxes(const std::vector<int64_t>& sizes,
                                        const std::vector<int64_t>& order,
                                        int64_t begin, int64_t numel);

}  // namespace fullshard

#endif  // FULLSHARD_IO_SHARDED_MANIFEST_H_
