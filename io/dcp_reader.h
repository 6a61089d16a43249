#ifndef FULLSHARD_IO_DCP_READER_H_
#define FULLSHARD_IO_DCP_READER_H_

#include <string>

#include "absl/status/statusor.h"
#include "fullshard/io/sharded_manifest.h"

namespace fullshard {

// Describes a folder that Python's torch.distributed.checkpoint.save wrote: a
// .metadata and files of small .pt archives. Paths of tensors are those of the
// nested dicts that were saved; what is no tensor is left out. Pieces have no
// checksums: the format has none.
//
// Errors, with the path: those of read_dcp_pickle; DataLoss for what is
// malformed or points out of a file; Unimplemented for chunks of one tensor
// that lie in memory in different orders, and for other serialization formats.
absl::StatusOr<ShardedManifest> read_dcp_metadata(const std::string& folder);

}  // namespace fullshard

#endif  // FULLSHARD_IO_DCP_READER_H_
