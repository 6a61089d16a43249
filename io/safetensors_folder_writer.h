#ifndef FULLSHARD_IO_SAFETENSORS_FOLDER_WRITER_H_
#define FULLSHARD_IO_SAFETENSORS_FOLDER_WRITER_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/io/atomic_folder.h"
#include "fullshard/io/safetensors_writer.h"

namespace fullshard {

struct SafetensorsFolderOptions {
  // A file takes tensors, in the announced order, while their bytes stay at or
  // below this; a larger tensor has a file of its own. Hugging Face's default.
  int64_t max_shard_bytes = int64_t{5} * 1000 * 1000 * 1000;
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  FileSystem* file_system = nullptr;  // null: FileSystem::posix()
};

// Writes a Hugging Face folder: model.safetensors, or several files like
// model-00001-of-00003.safetensors and model.safetensors.index.json. The whole
// folder appears in commit(), durable, under a name that must be free; without
// it nothing appears. Tensors come as with SafetensorsWriter; a file is
// complete as soon as its last tensor came, so in the announced order one file
// is open at a time.
// Errors: those of SafetensorsWriter; AlreadyExists if `path` is not free.
class SafetensorsFolderWriter {
 public:
  static absl::StatusOr<std::unique_ptr<SafetensorsFolderWriter>> create(
      const std::string& path, const std::vector<SafetensorsTensor>& tensors,
      const SafetensorsFolderOptions& options = {});

  absl::Status tensor(const std::string& name, const at::Tensor& tensor);
  absl::Status bytes(const std::string& name, absl::string_view bytes);

  // Adds a small file (config.json, ...) to the folder.
  absl::Status add_file(const std::string& name, absl::string_view bytes);

  absl::Status commit();

 private:
  struct Shard {
    std::string file_name;
    std::vector<SafetensorsTensor> tensors;
    std::unique_ptr<SafetensorsWriter> writer;  // from the first to the last
    bool is_done = false;
  };

  SafetensorsFolderWriter(std::unique_ptr<AtomicFolder> folder,
                          const SafetensorsFolderOptions& options)
      : options_(options), folder_(std::move(folder)) {}
  absl::Status plan(const std::vector<SafetensorsTensor>& tensors);
  absl::StatusOr<Shard*> open_shard(const std::string& name);
  absl::Status close_if_done(Shard* shard);
  std::string index_json() const;

  const SafetensorsFolderOptions options_;
  const std::unique_ptr<AtomicFolder> folder_;
  std::vector<Shard> shards_;
  std::unordered_map<std::string, size_t> shard_of_;
  int64_t total_bytes_ = 0;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_SAFETENSORS_FOLDER_WRITER_H_
