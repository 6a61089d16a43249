// ZIP archives.

#include "fullshard/io/atomic_file.h"
#include "fullshard/io/zip_reader.h"
#include "fullshard/io/zip_writer.h"
#include "fullshard/tests/io/fuzz/fuzz_target.h"
#include "fullshard/tests/io/public_checkpoints.h"
#include "fullshard/tests/io/temp_dir.h"

namespace fullshard {

std::vector<std::string> fuzz_corpus() {
  TempDir dir;
  std::vector<std::string> corpus;
  for (const uint64_t zip64_limit : {0, 0x7fffffff}) {
    const std::string path = dir.file(std::to_string(zip64_limit));
    {
      auto file = AtomicFile::create(path).value();
      ZipWriter zip(file->sink(), zip64_limit);
      (void)zip.add("a/data.pkl", "12345");
      (void)zip.add("a/data/0", std::string(300, 'x'));
      (void)zip.finish();
      (void)file->commit();
    }
    corpus.push_back(read_file(path));
  }
  if (have_public_checkpoints()) {
    corpus.push_back(read_file(public_checkpoint(kTorchScript)));
  }
  return corpus;
}

size_t fuzz_memory_limit(size_t size) { return size + (16 << 10); }

}  // namespace fullshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto zip =
      fullshard::ZipReader::open({reinterpret_cast<const char*>(data), size});
  if (!zip.ok()) return 0;
  for (const auto& entry : zip->entries()) (void)zip->verify(entry);
  (void)zip->find("a/data.pkl");
  return 0;
}
