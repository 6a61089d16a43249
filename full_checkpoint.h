#ifndef FULLSHARD_FULL_CHECKPOINT_H_
#define FULLSHARD_FULL_CHECKPOINT_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "fullshard/io/file_system.h"
#include "fullshard/sharding/fully_shard.h"

namespace fullshard {

struct FullCheckpointOptions {
  // The modules to write, in the file's order; empty: the whole model, as one
  // flat map, as torch.save(module.state_dict()) does. Every other module of
  // the model is in `all_module_keys`. A safetensors file is flat in any case.
  std::vector<std::string> module_keys;
  std::vector<std::string> all_module_keys;
  FileSystem* file_system = nullptr;  // null: FileSystem::posix()
};

// Saves the full state dict of a sharded model in one file: safetensors if its
// name ends so, else a .pt file that torch.load(path, weights_only=True) reads.
//
// Where all ranks see the file, each writes its own elements to their places,
// which follow from the layout: nothing is gathered, and no rank holds more
// than its shards. Else, and where a safetensors file needs elements in another
// order than memory has them, rank 0 gathers unit by unit and writes alone.
//
// Collective: returns on every rank when the file is durable. Errors: those of
// the file, of this rank; kAborted on ranks that had none themselves. What was
// at `path` is then untouched.
absl::Status save_full_checkpoint(const ShardedModule& model,
                                  const std::string& path,
                                  const FullCheckpointOptions& options = {});

// Copies this rank's elements of every parameter, and the buffers, from
// `source`, which returns views of a file, as the readers of io/ do. Every
// element is read once over all ranks, by the rank that owns it; replicas get
// theirs from it. `options` as for ShardedModule::load_full_state_dict, but for
// from_rank0.
//
// Collective. Errors: what `source` returns, or kInvalidArgument naming the key
// and what is wrong with its shape or dtype, before anything has changed;
// kDataLoss for a file that was cut short since, kUnavailable where it cannot
// be read: the model may then be loaded in part. kAborted on ranks that had
// none themselves.
absl::Status load_full_checkpoint(ShardedModule& model,
                                  const TensorSource& source,
                                  const LoadOptions& options = {});

}  // namespace fullshard

#endif  // FULLSHARD_FULL_CHECKPOINT_H_
