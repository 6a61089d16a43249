// safetensors files.

#include "fullshard/io/safetensors.h"
#include "fullshard/tests/io/fuzz/fuzz_target.h"
#include "fullshard/tests/io/public_checkpoints.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"

namespace fullshard {

std::vector<std::string> fuzz_corpus() {
  TempDir dir;
  const std::string path = dir.file("a");
  {
    const at::Tensor a = make_tensor(c10::ScalarType::Float, {3, 5});
    const at::Tensor b = make_tensor(c10::ScalarType::Byte, {0, 2});
    auto writer =
        SafetensorsWriter::create(
            path,
            {describe_safetensors("a", a.scalar_type(), {3, 5}).value(),
             describe_safetensors("b\n", b.scalar_type(), {0, 2}).value(),
             {"c", find_safetensors_dtype("F6_E2M3"), {4}}},
            {{{"format", "pt"}, {"caf\xc3\xa9", "\"\\"}}})
            .value();
    (void)writer->tensor("a", a);
    (void)writer->tensor("b\n", b);
    (void)writer->bytes("c", "123");
    (void)writer->commit();
  }
  std::vector<std::string> corpus = {read_file(path)};
  // The smallest entries that a header can have.
  std::string header = "{";
  for (int i = 0; i < 20'000; ++i) {
    header += (i == 0 ? "\"" : ",\"") + std::to_string(i) +
              R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  }
  header += "}";
  std::string start(8, '\0');
  for (size_t i = 0; i < 4; ++i) {
    start[i] = static_cast<char>(header.size() >> (8 * i));
  }
  corpus.push_back(start + header);
  if (have_public_checkpoints()) {
    corpus.push_back(read_file(public_checkpoint(kSafetensorsCheckpoint)));
    const std::string large = read_file(
        public_checkpoint(kLargeSafetensorsFolder) + "/model.safetensors");
    corpus.push_back(large.substr(0, 100'000));  // its header and a little more
  }
  return corpus;
}

// Opening costs its header; a tensor may be copied to align it.
size_t fuzz_memory_limit(size_t size) { return 2 * size + (64 << 10); }

}  // namespace fullshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const file = new fullshard::FuzzFile();
  const auto reader = fullshard::SafetensorsReader::open(file->set(data, size));
  if (!reader.ok()) return 0;
  for (const auto& place : (*reader)->tensors()) {
    const auto tensor = place.file->tensor(place.number);
    if (tensor.ok() && tensor->numel() < 1000) {
      (void)fullshard::logical_bytes(*tensor);
    }
  }
  return 0;
}
