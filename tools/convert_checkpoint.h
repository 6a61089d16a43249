#ifndef FULLSHARD_TOOLS_CONVERT_CHECKPOINT_H_
#define FULLSHARD_TOOLS_CONVERT_CHECKPOINT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "fullshard/io/file_system.h"
#include "fullshard/tools/key_map.h"

namespace fullshard {

struct ConvertOptions {
  // How the input's tensors are called; nullopt: what their names show. Only
  // looked at where `to` is set.
  std::optional<KeyStyle> from;
  // How the output's are; nullopt: as in the input.
  std::optional<KeyStyle> to;
  std::string fused_tower = "siglip";  // See KeyMapOptions.
  // Of one file of a folder; see SafetensorsFolderOptions.
  int64_t max_shard_bytes = int64_t{5} * 1000 * 1000 * 1000;
  FileSystem* file_system = nullptr;  // null: FileSystem::posix()
};

struct ConvertReport {
  std::string input_format;
  std::string output_format;
  size_t num_tensors = 0;
  int64_t num_bytes = 0;
  std::optional<KeyStyle> from;  // where keys were renamed
  std::vector<std::string> copied_files;
  // What the output does not hold: tensors without a place in its key style,
  // values without one in its format.
  std::vector<std::string> left_out;
};

// Writes the tensors of any checkpoint that open_checkpoint reads in another
// format, which the output's name tells: `.pt`, `.pth` and `.bin` are .pt
// files, `.safetensors` one safetensors file, `.dcp` and `step-<n>` a sharded
// checkpoint of {"model": {name: tensor}}, anything else a Hugging Face folder.
// One tensor is in memory at a time, and only where it has to be
// copied: files may be larger than memory.
//
// From a .pt file whose tensors lie in a dict "model" or "state_dict", these
// are taken. With keys of Prismatic, a .pt file is written as Prismatic reads
// it: {"model": {module: {key: tensor}}}. Numbers and strings of a .pt file
// become metadata of safetensors and the state of a sharded checkpoint; the
// other way they are left out, as is what lies beside "model". Tied tensors
// stay tied but in safetensors. A folder converted to a folder without renaming
// brings its other files (config.json, ...).
//
// The output appears whole or not at all; see the writers.
// Errors: those of readers and writers; InvalidArgument if `to` is given but
// the input's key style is not known, and those of map_keys.
absl::StatusOr<ConvertReport> convert_checkpoint(
    const std::string& input, const std::string& output,
    const ConvertOptions& options = {});

}  // namespace fullshard

#endif  // FULLSHARD_TOOLS_CONVERT_CHECKPOINT_H_
