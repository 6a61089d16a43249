#ifndef FULLSHARD_IO_FULL_CHECKPOINT_WRITER_H_
#define FULLSHARD_IO_FULL_CHECKPOINT_WRITER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/io/full_state_dict.h"

namespace fullshard {

// A tensor of a full state dict.
struct StateDictTensor {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> sizes;
  std::vector<int64_t> order;  // See core/memory_order.h.
};

// One file of a whole model, in the format that its name asks for: safetensors
// with the suffix ".safetensors" (names as they are, no sharing of tied
// tensors), else a .pt file as FullStateDictWriter describes it. Tensors are
// given to add(), or written to the file by others who ask for their place:
// several processes, each with some of the elements.
// The file appears in commit(), whole and durable; without it nothing appears.
//
// Errors: those of FullStateDictWriter and SafetensorsWriter. Tensors of
// modules that are not written may be given; they are skipped.
class FullCheckpointWriter {
 public:
  // `tensors`: everything that will come, aliases of tied tensors included, in
  // state-dict order, whatever options.names says.
  static absl::StatusOr<std::unique_ptr<FullCheckpointWriter>> create(
      const std::string& path, const std::vector<StateDictTensor>& tensors,
      FullStateDictOptions options);
  static bool is_safetensors(const std::string& path);
  // Whether a file of that name can hold the elements in their order in memory.
  static bool keeps_order(const std::string& path,
                          const StateDictTensor& tensor);

  virtual ~FullCheckpointWriter() = default;

  virtual absl::Status add(const std::string& name,
                           const at::Tensor& tensor) = 0;
  // Where others write the elements, in memory order: bytes from the beginning
  // of the file at temporary_path(); nothing if the tensor is not written.
  // Requires: keeps_order().
  virtual absl::StatusOr<std::optional<int64_t>> reserve(
      const StateDictTensor& tensor) = 0;
  // They are there and durable, and have this CRC-32.
  virtual absl::Status complete(const std::string& name, uint32_t crc) = 0;
  // Whether tensors can share their bytes. If so, `alias` is the same tensor as
  // `name`, which was added or reserved; else it is added by itself.
  virtual bool shares() const = 0;
  virtual absl::Status add_tied(const std::string& alias,
                                const std::string& name) = 0;
  virtual absl::Status commit() = 0;
  virtual const std::string& temporary_path() const = 0;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_FULL_CHECKPOINT_WRITER_H_
