#ifndef FULLSHARD_IO_DCP_METADATA_H_
#define FULLSHARD_IO_DCP_METADATA_H_

#include <string>

#include "fullshard/io/sharded_manifest.h"

namespace fullshard {

// The file `.metadata` by which torch.distributed.checkpoint (PyTorch 2.x)
// reads the tensors of a sharded checkpoint: a pickle of its class Metadata.
// Keys are flat names; an alias refers to the same bytes.
std::string dcp_metadata(const ShardedManifest& manifest);

}  // namespace fullshard

#endif  // FULLSHARD_IO_DCP_METADATA_H_
