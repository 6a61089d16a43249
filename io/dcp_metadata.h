#ifndef FULLSHARD_IO_DCP_METADATA_H_
#define FULLSHARD_IO_DCP_METADATA_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "fullshard/io/sharded_manifest.h"

namespace fullshard {

// A value of Python's beside the tensors, which torch.save wrote to a file of
// the checkpoint.
struct DcpObject {
  // Keys of nested dicts and places in lists.
  using Key = std::variant<std::string, int64_t>;
  std::vector<Key> path;
  std::string file_name;
  int64_t item_offset = 0;
  int64_t item_bytes = 0;
};

// The file `.metadata` by which torch.distributed.checkpoint (PyTorch 2.x)
// reads a sharded checkpoint: a pickle of its class Metadata. Keys are flat
// names; an alias refers to the same bytes.
std::string dcp_metadata(const ShardedManifest& manifest,
                         const std::vector<DcpObject>& objects = {});

}  // namespace fullshard

#endif  // FULLSHARD_IO_DCP_METADATA_H_
