// Pickles by themselves, so that mutations are not stopped by checksums.

#include <memory>

#include "fullshard/io/pickle_reader.h"
#include "fullshard/io/zip_reader.h"
#include "fullshard/tests/io/fuzz/fuzz_target.h"
#include "fullshard/tests/io/public_checkpoints.h"
#include "fullshard/tests/io/temp_dir.h"

namespace fullshard {

// {"a": 1, "b": [1.0, None, 10000, the list again]}
constexpr char kPickle[] =
    "\x80\x02}q\x00(X\x01\x00\x00\x00"
    "aK\x01X\x01\x00\x00\x00"
    "b]q\x01(G?\xf0\x00\x00\x00\x00\x00\x00NM\x10\x27h\x01eu.";

std::vector<std::string> fuzz_corpus() {
  std::vector<std::string> corpus = {std::string(kPickle, sizeof(kPickle) - 1)};
  // What costs most for its size: containers, marks, values.
  for (const char* piece : {"]", "(", "N", "}", ")", "M\x10\x27", "(t"}) {
    std::string hostile = "\x80\x02";
    while (hostile.size() < (2 << 20)) hostile += piece;
    corpus.push_back(hostile);
  }
  if (!have_public_checkpoints()) return corpus;
  for (const char* name : {kZipCheckpoint, kTorchScript}) {
    const std::string bytes = read_file(public_checkpoint(name));
    const auto zip = ZipReader::open(bytes);
    if (!zip.ok()) continue;
    for (const ZipReader::Entry& entry : zip->entries()) {
      const std::string entry_name(entry.name);
      if (entry_name.find("/data.pkl") == std::string::npos) continue;
      corpus.emplace_back(zip->data(entry).value());
    }
  }
  for (const std::string& name : python2_checkpoints()) {
    const std::string bytes = read_file(public_checkpoint(name));
    corpus.push_back(bytes.substr(119));  // behind magic, version and system
  }
  return corpus;
}

size_t fuzz_memory_limit(size_t size) { return 16 * size + (4 << 20); }

}  // namespace fullshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::make_shared<const std::string>(
      reinterpret_cast<const char*>(data), size);
  const auto pickle =
      fullshard::read_pickle_prefix(*bytes, bytes, bytes->size());
  if (pickle.ok() && pickle->root.is_dict()) {
    for (size_t i = 0; i < pickle->root.size(); ++i) {
      if (pickle->root.item(i).is_tensor()) {
        (void)pickle->root.item(i).as_tensor();
      }
    }
  }
  return 0;
}
