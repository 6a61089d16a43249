#ifndef FULLSHARD_IO_SHARDED_CHECKPOINT_WRITER_H_
#define FULLSHARD_IO_SHARDED_CHECKPOINT_WRITER_H_

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/io/byte_sink.h"
#include "fullshard/io/dcp_metadata.h"
#include "fullshard/io/file_system.h"
#include "fullshard/io/sharded_manifest.h"

namespace fullshard {

// Some elements of a tensor, as one rank saves them.
struct ShardToSave {
  std::vector<std::string> path;  // See ShardedManifest::Tensor.
  std::vector<std::vector<std::string>> aliases;
  std::vector<int64_t> sizes;  // Of the whole tensor.
  std::vector<int64_t> order;  // Of its dimensions in memory.
  int64_t begin = 0;           // First element, in memory order.
  at::Tensor values;           // 1-D, contiguous, on the CPU.
};

// A value of Python's for torch.distributed.checkpoint, which this library does
// not read back.
struct ObjectToSave {
  std::vector<DcpObject::Key> path;  // Keys of dicts and places in lists.
  std::string pickle;                // See PickleWriter.
};

// A sharded checkpoint is a folder that all ranks write together:
//   __<rank>_0.distcp   this rank's elements
//   .metadata           what torch.distributed.checkpoint reads
//   manifest.json       what this library reads
// The two indexes describe the same bytes. The ranks write into a hidden folder
// beside the final one, on a file system that they share; rank 0 renames it
// when all are done, so a checkpoint appears whole or not at all. They meet
// through files in that folder and exchange nothing else, so that a thread of
// its own can save while training goes on.
class ShardedCheckpointWriter {
 public:
  // Where the ranks write a checkpoint that is to appear as `folder`.
  static std::string temporary_folder(const std::string& folder);

  // Rank 0's part: makes the hidden folder, in place of what a killed save
  // left. The other ranks start after it, and every rank has returned from
  // write() of a save to the same folder before.
  static absl::Status prepare(const std::string& folder,
                              FileSystem& file_system = FileSystem::posix());

  ShardedCheckpointWriter(std::string folder, int rank, int world_size,
                          std::chrono::milliseconds timeout,
                          FileSystem& file_system = FileSystem::posix());

  // Writes this rank's file and waits for the others; rank 0 then makes the
  // checkpoint appear. `state` and `objects` are rank 0's. Returns on every
  // rank when it is durable.
  //
  // Errors, on every rank if on one: those of the file system, of this rank or
  // of another one, named; DeadlineExceeded naming a rank that did not finish.
  // What was at `folder` is then untouched; the hidden folder stays, without
  // data, until prepare() of the same. Only where the parent folder cannot be
  // synced is rank 0 alone in reporting it, and the checkpoint in place.
  absl::Status write(const std::vector<ShardToSave>& shards,
                     const std::map<std::string, std::string>& state,
                     const std::vector<ObjectToSave>& objects = {});
  // In place of write(), where this rank has nothing that may be saved; fails
  // the save on every rank. Returns `error`; the others get kAborted with it.
  absl::Status give_up(const absl::Status& error);

 private:
  absl::Status write_own(const std::vector<ShardToSave>& shards,
                         const std::vector<ObjectToSave>& objects);
  absl::Status meet(absl::Status status,
                    const std::map<std::string, std::string>& state);
  absl::Status finish(const std::map<std::string, std::string>& state);
  absl::StatusOr<ShardedManifest> collect() const;
  std::optional<absl::Status> wait_for_rank_0();
  void leave_error(const std::string& name, const absl::Status& status);
  void remove_data();
  // The name by which a rank tells how its part went.
  static std::string marker(int rank, const char* what);
  std::string in_temporary(const std::string& name) const;

  const std::string folder_;
  const std::string temporary_;
  const int rank_;
  const int world_size_;
  const std::chrono::milliseconds timeout_;
  FileSystem& file_system_;
  std::vector<DcpObject> objects_;  // As rank 0 has written them.
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_SHARDED_CHECKPOINT_WRITER_H_
