// .pt files: the zip and the legacy format.

#include "absl/strings/str_cat.h"
#include "fullshard/io/checkpoint_reader.h"
#include "fullshard/io/pt_writer.h"
#include "fullshard/tests/io/fuzz/fuzz_target.h"
#include "fullshard/tests/io/public_checkpoints.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"

namespace fullshard {

std::vector<std::string> fuzz_corpus() {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  {
    auto writer = PtWriter::create(path).value();
    (void)writer->tensor("a", make_tensor(c10::ScalarType::Float, {3, 5}));
    (void)writer->begin_ordered_dict("nested");
    (void)writer->tensor("b", make_tensor(c10::ScalarType::UInt16, {7}));
    (void)writer->end_dict();
    (void)writer->value("step", int64_t{1} << 40);
    (void)writer->value("rate", 0.5);
    (void)writer->commit();
  }
  std::vector<std::string> corpus = {read_file(path)};
  if (have_public_checkpoints()) {
    for (const char* name :
         {"facenet_pytorch/data/pnet.pt", "lpips/weights/v0.0/alex.pth",
          "lpips/weights/v0.1/squeeze.pth", kZipCheckpoint, kTorchScript}) {
      corpus.push_back(read_file(public_checkpoint(name)));
    }
  }
  return corpus;
}

// The pickle's values: see read_pickle_prefix. The rest, and copies of storages
// that are not aligned, cost less than the file.
size_t fuzz_memory_limit(size_t size) { return 16 * size + (4 << 20); }

}  // namespace fullshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const file = new fullshard::FuzzFile();
  auto reader = fullshard::open_checkpoint(file->set(data, size));
  if (!reader.ok()) return 0;
  for (size_t i = 0; i < (*reader)->tensors().size(); ++i) {
    const auto tensor = (*reader)->tensor(i);
    if (tensor.ok() && tensor->numel() < 1000) {
      (void)fullshard::logical_bytes(*tensor);
    }
  }
  return 0;
}
