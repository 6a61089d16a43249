#ifndef FULLSHARD_IO_WEIGHT_MAP_H_
#define FULLSHARD_IO_WEIGHT_MAP_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace fullshard {

// What a Hugging Face index (model.safetensors.index.json,
// pytorch_model.bin.index.json) says: the tensors of each file, by file name.
// Files are those of the index's own folder.
using WeightMap = std::map<std::string, std::vector<std::string>>;

// Reads the `weight_map` of an index; other keys are not looked at.
// Errors, with the path: those of MappedFile; DataLoss for malformed JSON, a
// tensor that appears twice, or a file that is no plain name.
absl::StatusOr<WeightMap> read_weight_map(const std::string& path);

}  // namespace fullshard

#endif  // FULLSHARD_IO_WEIGHT_MAP_H_
