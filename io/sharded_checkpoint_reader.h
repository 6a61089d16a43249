#ifndef FULLSHARD_IO_SHARDED_CHECKPOINT_READER_H_
#define FULLSHARD_IO_SHARDED_CHECKPOINT_READER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/sharded_manifest.h"

namespace fullshard {

// Reads ranges of the tensors of a sharded checkpoint, whatever number of ranks
// wrote it; or of one that Python's torch.distributed.checkpoint wrote, which
// has no checksums (see io/dcp_reader.h). Otherwise every block that a range
// touches is compared with its checksum, so that a range costs its own bytes
// and at most two blocks more.
class ShardedCheckpointReader {
 public:
  // Errors: NotFound if there is no folder; DataLoss for a checkpoint that is
  // incomplete (no manifest, a file missing or of another size, elements
  // missing) or malformed, with the reason.
  static absl::StatusOr<std::unique_ptr<ShardedCheckpointReader>> open(
      const std::string& folder);

  const std::string& folder() const { return folder_; }
  const ShardedManifest& manifest() const { return manifest_; }
  // By flat name, an alias too; null if there is none.
  const ShardedManifest::Tensor* find(absl::string_view name) const;

  // Fills `out`, 1-D, contiguous and on the CPU, with elements [begin, begin +
  // out.numel()) of the tensor whose memory has `order`. Values of another
  // dtype are converted.
  //
  // Errors: DataLoss naming tensor and file for a bad checksum or a file that
  // was cut short.
  absl::Status read(const ShardedManifest::Tensor& tensor,
                    const std::vector<int64_t>& order, int64_t begin,
                    at::Tensor out) const;
  // The whole tensor, with strides as it was saved.
  absl::StatusOr<at::Tensor> tensor(
      const ShardedManifest::Tensor& tensor) const;

  // By torch.distributed.checkpoint, not by this library.
  bool is_of_python() const { return is_of_python_; }

  // Compares every checksum.
  absl::Status verify() const;

 private:
  explicit ShardedCheckpointReader(std::string folder)
      : folder_(std::move(folder)) {}
  absl::Status open_files();
  absl::Status read_same_order(const ShardedManifest::Tensor& tensor,
                               int64_t begin, int64_t numel, char* out) const;
  absl::Status read_piece(const ShardedManifest::Tensor& tensor,
                          const ShardedManifest::Piece& piece, int64_t begin,
                          int64_t end, char* out) const;
  absl::Status bad_checksum(const ShardedManifest::Tensor& tensor,
                            const ShardedManifest::Piece& piece, int64_t begin,
                            int64_t end) const;

  const std::string folder_;
  ShardedManifest manifest_;
  bool is_of_python_ = false;
  std::vector<std::shared_ptr<MappedFile>> files_;  // Null: empty.
  std::unordered_map<std::string, size_t> by_name_;
};

// "step-000123".
std::string step_folder_name(int64_t step);

// The checkpoints `step-*` in a folder, the latest first, with those that an
// unfinished replacement left aside. Nothing is opened.
std::vector<std::string> list_step_folders(const std::string& folder);

struct LatestCheckpoint {
  std::string path;                  // Empty: there is none.
  std::vector<std::string> skipped;  // Those that are incomplete, and why.
};
// The latest complete checkpoint in a folder.
LatestCheckpoint find_latest_checkpoint(const std::string& folder);

}  // namespace fullshard

#endif  // FULLSHARD_IO_SHARDED_CHECKPOINT_READER_H_
