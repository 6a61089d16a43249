#include "fullshard/io/full_checkpoint_writer.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "absl/strings/match.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
#include "fullshard/io/safetensors_writer.h"

namespace fullshard {
namespace {

class PtCheckpoint final : public FullCheckpointWriter {
 public:
  explicit PtCheckpoint(std::unique_ptr<FullStateDictWriter> writer)
      : writer_(std::move(writer)) {}

  absl::Status add(const std::string& name, const at::Tensor& tensor) override {
    return writer_->add(name, tensor);
  }
  absl::StatusOr<std::optional<int64_t>> reserve(
      const StateDictTensor& tensor) override {
    return writer_->reserve(tensor.name, tensor.dtype, tensor.sizes,
                            strides_of(tensor.sizes, tensor.order));
  }
  absl::Status complete(const std::string& name, uint32_t crc) override {
    return writer_->complete(name, crc);
  }
  bool shares() const override { return true; }
  absl::Status add_tied(const std::string& alias,
                        const std::string& name) override {
    return writer_->add_tied(alias, name);
  }
  absl::Status commit() override { return writer_->commit(); }
  const std::string& temporary_path() const override {
    return writer_->temporary_path();
  }

 private:
  const std::unique_ptr<FullStateDictWriter> writer_;
};

class SafetensorsCheckpoint final : public FullCheckpointWriter {
 public:
  SafetensorsCheckpoint(std::unique_ptr<SafetensorsWriter> writer,
                        std::unordered_set<std::string> written)
      : writer_(std::move(writer)), written_(std::move(written)) {}

  absl::Status add(const std::string& name, const at::Tensor& tensor) override {
    return written_.count(name) == 0 ? absl::OkStatus()
                                     : writer_->tensor(name, tensor);
  }
  absl::StatusOr<std::optional<int64_t>> reserve(
      const StateDictTensor& tensor) override {
    if (written_.count(tensor.name) == 0) return std::nullopt;
    return writer_->reserve(tensor.name);
  }
  absl::Status complete(const std::string&, uint32_t) override {
    return absl::OkStatus();  // The format has no checksums.
  }
  bool shares() const override { return false; }
  absl::Status add_tied(const std::string&, const std::string&) override {
    return absl::UnimplementedError("safetensors cannot share tensors");
  }
  absl::Status commit() override { return writer_->commit(); }
  const std::string& temporary_path() const override {
    return writer_->temporary_path();
  }

 private:
  const std::unique_ptr<SafetensorsWriter> writer_;
  const std::unordered_set<std::string> written_;
};

absl::StatusOr<std::unique_ptr<FullCheckpointWriter>> create_safetensors(
    const std::string& path, const std::vector<StateDictTensor>& tensors,
    const FullStateDictOptions& options) {
  std::vector<SafetensorsTensor> announced;
  std::unordered_set<std::string> written;
  for (const StateDictTensor& tensor : tensors) {
    FS_ASSIGN_OR_RETURN(const bool selected,
                        is_written(path, tensor.name, options));
    if (!selected) continue;
    written.insert(tensor.name);
    FS_ASSIGN_OR_RETURN(
        announced.emplace_back(),
        describe_safetensors(tensor.name, tensor.dtype, tensor.sizes));
  }
  // What libraries that read such files ask for.
  SafetensorsWriterOptions writer_options;
  writer_options.metadata = {{"format", "pt"}};
  writer_options.file_system = options.file_system;
  FS_ASSIGN_OR_RETURN(
      auto writer, SafetensorsWriter::create(path, announced, writer_options));
  return std::make_unique<SafetensorsCheckpoint>(std::move(writer),
                                                 std::move(written));
}

}  // namespace

bool FullCheckpointWriter::is_safetensors(const std::string& path) {
  return absl::EndsWith(path, ".safetensors");
}

bool FullCheckpointWriter::keeps_order(const std::string& path,
                                       const StateDictTensor& tensor) {
  // Row-major is the order 0, 1, 2, ...
  return !is_safetensors(path) ||
         std::is_sorted(tensor.order.begin(), tensor.order.end());
}

absl::StatusOr<std::unique_ptr<FullCheckpointWriter>>
FullCheckpointWriter::create(const std::string& path,
                             const std::vector<StateDictTensor>& tensors,
                             FullStateDictOptions options) {
  if (is_safetensors(path)) return create_safetensors(path, tensors, options);
  options.names.clear();
  for (const StateDictTensor& tensor : tensors) {
    options.names.push_back(tensor.name);
  }
  FS_ASSIGN_OR_RETURN(auto writer, FullStateDictWriter::create(path, options));
  return std::make_unique<PtCheckpoint>(std::move(writer));
}

}  // namespace fullshard
