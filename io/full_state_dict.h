#ifndef FULLSHARD_IO_FULL_STATE_DICT_H_
#define FULLSHARD_IO_FULL_STATE_DICT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/io/file_system.h"
#include "fullshard/io/pt_reader.h"
#include "fullshard/io/pt_writer.h"

namespace fullshard {

// The file of a whole model: `{"model": {module key: OrderedDict{key without
// the module prefix: tensor}}}`, one map per top-level module.

// "step-000123-epoch-04-loss=0.5678.pt"; without a loss "...-loss=inf.pt".
std::string checkpoint_name(int64_t global_step, int64_t epoch,
                            std::optional<double> loss);

struct FullStateDictOptions {
  // The modules to write, in the file's order. Empty: everything, as one flat
  // map {name: tensor}, as torch.save(module.state_dict()) does.
  std::vector<std::string> module_keys;
  // Every module of the model; empty: the same as module_keys. Tensors of
  // those that are not written are skipped.
  std::vector<std::string> all_module_keys;
  // Every full name, in state-dict order. Names of modules that are not
  // written may be left out.
  std::vector<std::string> names;
  FileSystem* file_system = nullptr;  // null: FileSystem::posix()
};

// Whether a tensor of that name is among what `options` asks to write. A name
// belongs to module M if it starts with "M."; of several such modules, to the
// longest.
// Errors: InvalidArgument if it belongs to none of the model's modules.
absl::StatusOr<bool> is_written(const std::string& path,
                                const std::string& full_name,
                                const FullStateDictOptions& options);

// Writes a full state dict whose tensors arrive in any order; each is on its
// way to the disk when add() returns, so the caller may use its memory again
// at once. The file appears in commit(); without it nothing appears.
class FullStateDictWriter {
 public:
  // Errors: those of the file; InvalidArgument for a name that appears twice
  // or belongs to none of the model's modules.
  static absl::StatusOr<std::unique_ptr<FullStateDictWriter>> create(
      const std::string& path, const FullStateDictOptions& options);

  // Errors: InvalidArgument for a name that was not announced or came before;
  // those of PtWriter.
  absl::Status add(const std::string& full_name, const at::Tensor& tensor);

  // Records that `full_name` is the same tensor as `added_name`.
  // Requires: add(added_name) succeeded.
  absl::Status add_tied(const std::string& full_name,
                        const std::string& added_name);

  // Leaves room for a dense tensor whose elements others write, in memory
  // order, to the file at temporary_path(). Returns its place, in bytes from
  // the file's beginning; nothing if its module is not written.
  // Errors: those of add().
  absl::StatusOr<std::optional<int64_t>> reserve(
      const std::string& full_name, c10::ScalarType dtype,
      const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);
  // They are there, durable, and have this CRC-32.
  // Requires: reserve(full_name) returned a place.
  absl::Status complete(const std::string& full_name, uint32_t crc);

  // Errors: FailedPrecondition if an announced tensor did not come.
  absl::Status commit();

  const std::string& temporary_path() const {
    return writer_->temporary_path();
  }

 private:
  struct Slot {
    std::string key;  // without the module prefix
    std::optional<PickledTensor> stored;
    std::optional<PtWriter::Reserved> reserved;
  };
  struct Module {
    std::string key;
    std::vector<Slot> slots;
  };

  FullStateDictWriter(std::unique_ptr<PtWriter> writer,
                      const FullStateDictOptions& options);
  absl::Status announce(const std::vector<std::string>& names);
  absl::Status place(const Module& module);
  // Null: the name's module is not written.
  absl::StatusOr<Slot*> find_slot(const std::string& full_name);
  absl::Status invalid(const std::string& full_name, const char* what) const;

  std::unique_ptr<PtWriter> writer_;
  const FullStateDictOptions options_;
  std::vector<Module> modules_;  // One without a key: the flat map.
  std::unordered_map<std::string, size_t> module_index_;
  // Full name -> (module, slot).
  std::unordered_map<std::string, std::pair<size_t, size_t>> index_;
};

// Reads a full state dict: the form above, `{module key: {key: tensor}}`,
// `{"model": {name: tensor}}` or `{name: tensor}`.
class FullStateDictReader {
 public:
  // Errors: those of PtReader; InvalidArgument where the file holds something
  // else than tensors by name, with the place and what is there.
  static absl::StatusOr<std::unique_ptr<FullStateDictReader>> open(
      const std::string& path);

  // The module keys in the file's order; empty for a flat dict.
  const std::vector<std::string>& module_keys() const { return module_keys_; }
  // The full names ("projector.0.weight") in the file's order.
  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& full_name) const;

  // As PtReader::tensor. Errors: NotFound for a name the file lacks.
  absl::StatusOr<at::Tensor> tensor(const std::string& full_name);

  // Reads the whole file and compares every checksum.
  absl::Status verify() const { return reader_->verify(); }

 private:
  explicit FullStateDictReader(std::unique_ptr<PtReader> reader)
      : reader_(std::move(reader)) {}
  absl::Status read_names();
  absl::Status read_map(const PtValue& map, const std::string& module_key,
                        const std::string& place);
  absl::Status wrong_kind(const std::string& place, const PtValue& value,
                          const char* expected) const;

  std::unique_ptr<PtReader> reader_;
  std::vector<std::string> module_keys_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, PtValue> tensors_;
};

// Lets `latest-checkpoint.pt` beside `checkpoint_path` point to it: a relative
// symbolic link, replaced atomically, else a copy.
// Errors: neither worked. The checkpoint itself stands; callers warn.
absl::Status update_latest(const std::string& checkpoint_path,
                           FileSystem& file_system = FileSystem::posix());

// Returns the checkpoint file that `path` means: itself, or the latest one of
// a run directory or its `checkpoints` folder.
// Errors: NotFound, with what was looked for.
absl::StatusOr<std::string> resolve_checkpoint(const std::string& path);

}  // namespace fullshard

#endif  // FULLSHARD_IO_FULL_STATE_DICT_H_
