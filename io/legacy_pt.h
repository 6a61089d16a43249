#ifndef FULLSHARD_IO_LEGACY_PT_H_
#define FULLSHARD_IO_LEGACY_PT_H_

#include <memory>
#include <string>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/pt_value.h"

namespace fullshard {

// What a .pt file of before PyTorch 1.6 holds.
struct LegacyPt {
  PtValue root;
  // The bytes of each storage by its key, views of the file.
  std::unordered_map<std::string, absl::string_view> storages;
};

// Reads the five pickles of the legacy format (a magic number, the format's
// version, facts of the writing system, the value, the keys of its storages in
// file order), then finds the storages behind them: each a number of elements
// in eight bytes, then the elements (torch/serialization.py, _legacy_save).
// What follows the last storage is not read.
// Requires: file_kind(file->bytes()) == FileKind::kLegacyPt.
// Errors: as read_pickle_prefix; DataLoss where a storage reaches out of the
// file; Unimplemented for a big-endian writer.
absl::StatusOr<LegacyPt> read_legacy_pt(
    const std::shared_ptr<MappedFile>& file);

}  // namespace fullshard

#endif  // FULLSHARD_IO_LEGACY_PT_H_
