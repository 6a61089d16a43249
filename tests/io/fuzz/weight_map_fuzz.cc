// The index of a Hugging Face folder.

#include "fullshard/io/weight_map.h"
#include "fullshard/tests/io/fuzz/fuzz_target.h"

namespace fullshard {

std::vector<std::string> fuzz_corpus() {
  std::string large = R"({"metadata": {"total_size": 12}, "weight_map": {)";
  for (int i = 0; i < 200; ++i) {
    large += (i == 0 ? "\"layer." : ", \"layer.") + std::to_string(i) +
             R"(.weight": "model-00001-of-00002.safetensors")";
  }
  return {
      large + "}}",
      R"({"weight_map": {"a\u00e9": "x.bin", "b": "y.bin"}, "x": [1, {"y": null}]})"};
}

// Two strings and a node for each entry of about their length.
size_t fuzz_memory_limit(size_t size) { return 16 * size + (64 << 10); }

}  // namespace fullshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const file = new fullshard::FuzzFile();
  (void)fullshard::read_weight_map(file->set(data, size));
  return 0;
}
