#ifndef FULLSHARD_IO_SAFETENSORS_NAMES_H_
#define FULLSHARD_IO_SAFETENSORS_NAMES_H_

namespace fullshard {

// The names of a Hugging Face folder's weights: one file, or an index and
// files like model-00001-of-00003.safetensors.
constexpr char kSafetensorsName[] = "model.safetensors";
constexpr char kSafetensorsIndexName[] = "model.safetensors.index.json";

}  // namespace fullshard

#endif  // FULLSHARD_IO_SAFETENSORS_NAMES_H_
