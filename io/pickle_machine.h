#ifndef FULLSHARD_IO_PICKLE_MACHINE_H_
#define FULLSHARD_IO_PICKLE_MACHINE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fullshard/io/dtype_names.h"
#include "fullshard/io/pickle_format.h"
#include "fullshard/io/pickle_reader.h"
#include "fullshard/io/pt_value.h"

namespace fullshard::internal {

inline constexpr size_t kMaxPickleDepth = 1000;
inline constexpr uint32_t kNoNode = 0xffffffff;

inline constexpr size_t kMemoryPerFileByte = 8;
inline constexpr size_t kFreeMemory = size_t{1} << 20;

absl::Status malformed_pickle(absl::string_view what);

enum class PickleDialect {
  kCheckpoint,  // Of torch.save.
  kDcp,         // .metadata of torch.distributed.checkpoint.
};

// The machine that runs a pickle's opcodes.
class PickleReader {
 public:
  PickleReader(absl::string_view bytes, std::shared_ptr<const void> owner,
               PickleDialect dialect, size_t max_memory)
      : document_(std::make_shared<PickleDocument>()),
        dialect_(dialect),
        num_available_(bytes.size()),
        max_memory_(max_memory),
        rest_(bytes) {
    document_->owner = std::move(owner);
    make_constants();
  }

  absl::StatusOr<Pickle> read();

 private:
  // Shared nodes for what takes one or two bytes in the input.
  void make_constants();
  uint32_t none() const { return 0; }
  uint32_t boolean(bool value) const { return value ? 2 : 1; }
  uint32_t empty_tuple() const { return 3; }

  const PickleNode& node(uint32_t index) { return document_->node(index); }
  int64_t integer(uint32_t index) { return document_->integer(index); }
  PtKind kind(uint32_t index) { return node(index).kind; }

  absl::Status run(Opcode code);
  absl::Status run_scalar(Opcode code);
  absl::Status run_container(Opcode code);
  absl::Status run_object(Opcode code);

  absl::StatusOr<uint64_t> little_endian(size_t num_bytes);
  absl::StatusOr<absl::string_view> take(uint64_t num_bytes);
  absl::StatusOr<absl::string_view> take_line();

  absl::StatusOr<uint32_t> make(PickleNode node);
  absl::Status push_new(PickleNode node);
  absl::Status push_integer(int64_t value);
  absl::Status push_text(PtKind kind, absl::string_view text);
  absl::StatusOr<uint32_t> pop();
  absl::StatusOr<std::vector<uint32_t>> pop_to_mark();
  absl::Status push_tuple(std::vector<uint32_t> items);

  absl::Status read_long();
  absl::Status read_float();
  absl::Status read_global();
  absl::Status push_global(absl::string_view global);
  absl::Status unexpected(Opcode code) const;
  bool is_dcp() const { return dialect_ == PickleDialect::kDcp; }
  absl::Status run_dcp(Opcode code);
  absl::Status call_dcp(absl::string_view global,
                        const std::vector<uint32_t>& arguments);
  absl::Status put(uint64_t slot);
  absl::Status get(uint64_t slot);
  absl::Status add_items(bool to_dict, std::vector<uint32_t> items);
  absl::Status persistent_id();
  absl::Status reduce();
  absl::Status build();

  absl::Status call(absl::string_view global, uint32_t arguments);
  absl::Status call_ordered_dict(uint32_t pairs);
  absl::Status call_device(const std::vector<uint32_t>& arguments);
  absl::Status call_old_rebuild_tensor(const std::vector<uint32_t>& arguments);
  absl::Status call_rebuild_tensor(const std::vector<uint32_t>& arguments,
                                   bool with_dtype);
  absl::Status call_rebuild_parameter(const std::vector<uint32_t>& arguments);
  absl::StatusOr<const DtypeName*> tensor_dtype(uint32_t storage,
                                                uint32_t dtype);
  absl::Status check_view(uint32_t storage, int64_t element_bytes,
                          uint32_t offset, uint32_t sizes, uint32_t strides);
  const std::vector<uint32_t>* integers(uint32_t tuple);

  absl::Status check_tree(uint32_t root);
  absl::Status check_keys(const PickleNode& dict);

  size_t num_read() const { return num_available_ - rest_.size(); }
  size_t memory() const;
  std::vector<PickledStorage> storages() const;

  std::shared_ptr<PickleDocument> document_;
  const PickleDialect dialect_;
  const size_t num_available_;
  const size_t max_memory_;
  absl::string_view rest_;
  std::vector<uint32_t> stack_;
  std::vector<size_t> marks_;
  std::vector<uint32_t> memo_;
  size_t num_items_ = 0;  // of all containers
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_IO_PICKLE_MACHINE_H_
