// The two indexes of a sharded checkpoint: manifest.json and .metadata. An
// input stands in place of either, beside data files that are there.

#include <chrono>
#include <filesystem>
#include <fstream>

#include "ATen/ops/arange.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/io/sharded_checkpoint_writer.h"
#include "fullshard/tests/io/fuzz/fuzz_target.h"
#include "fullshard/tests/io/temp_dir.h"

namespace fullshard {
namespace {

// Written once; lives as long as the process.
const std::string& checkpoint() {
  static const auto* const folder = [] {
    static auto* const dir = new TempDir();
    auto* const path = new std::string(dir->file("step-000001"));
    (void)ShardedCheckpointWriter::prepare(*path);
    std::vector<ShardToSave> shards;
    for (int i = 0; i < 3; ++i) {
      ShardToSave shard;
      shard.path = {"model", "layer" + std::to_string(i) + ".weight"};
      shard.aliases = {{"model", "tied" + std::to_string(i)}};
      shard.sizes = {3, 4};
      shard.order = {0, 1};
      shard.values = at::arange(12, at::kFloat);
      shards.push_back(shard);
    }
    ShardedCheckpointWriter writer(*path, 0, 1, std::chrono::seconds(10));
    (void)writer.write(shards, {{"step", "1"}});
    return path;
  }();
  return *folder;
}

}  // namespace

std::vector<std::string> fuzz_corpus() {
  std::vector<std::string> corpus;
  for (const char* name : {"/manifest.json", "/.metadata"}) {
    corpus.push_back(read_file(checkpoint() + name));
  }
  return corpus;
}

// Names, shapes and pieces are objects of their own.
size_t fuzz_memory_limit(size_t size) { return 32 * size + (4 << 20); }

}  // namespace fullshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fullshard;
  const bool is_json = size > 0 && data[0] == '{';
  static auto* const copy = new TempDir();
  const std::string folder = copy->file(is_json ? "json" : "pickle");
  if (!std::filesystem::exists(folder)) {
    std::filesystem::copy(checkpoint(), folder);
    std::filesystem::remove(folder + "/manifest.json");
  }
  std::ofstream(folder + (is_json ? "/manifest.json" : "/.metadata"),
                std::ios::binary)
      .write(reinterpret_cast<const char*>(data),
             static_cast<std::streamsize>(size));
  const auto reader = ShardedCheckpointReader::open(folder);
  if (!reader.ok()) return 0;
  for (const auto& tensor : (*reader)->manifest().tensors) {
    if (tensor.numel() < 1000) (void)(*reader)->tensor(tensor);
  }
  return 0;
}
