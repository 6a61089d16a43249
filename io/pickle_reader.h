#ifndef FULLSHARD_IO_PICKLE_READER_H_
#define FULLSHARD_IO_PICKLE_READER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fullshard/io/pt_value.h"

namespace fullshard {

// Reads a protocol-2 pickle of containers, numbers, strings, OrderedDicts,
// tensors, parameters, torch.Size, dtypes and devices. Runs nothing: a pickle
// that names anything else is refused by that name.
//
// Time and memory are linear in the input (memory at most eight times its size
// and a mebibyte); nesting is limited to 1000 levels,
// and shared values may not unfold to more than the input's size.
// Errors: PermissionDenied for a refused global; Unimplemented for another
// protocol; DataLoss for all that is malformed.
absl::StatusOr<PtValue> read_pickle(std::string bytes);

// Reads the file .metadata of torch.distributed.checkpoint, of protocol 2 to 5:
// instances of its classes become kObject. As inert as the above.
absl::StatusOr<PtValue> read_dcp_pickle(std::string bytes);

// A storage that a pickle names.
struct PickledStorage {
  absl::string_view key;
  int64_t element_bytes;
  int64_t numel;
};

struct Pickle {
  PtValue root;
  size_t num_bytes;                      // of the pickle
  std::vector<PickledStorage> storages;  // one may come several times
};

// Reads the pickle at the start of `bytes`; anything may follow it. Python 2's
// pickles and those of the legacy format are read too.
// Lifetime: the values view `bytes`, which `owner` keeps alive.
// Errors: also ResourceExhausted, where the values would need more memory than
// eight times `file_bytes` (the file that holds the pickle) and a mebibyte.
absl::StatusOr<Pickle> read_pickle_prefix(absl::string_view bytes,
                                          std::shared_ptr<const void> owner,
                                          size_t file_bytes);

}  // namespace fullshard

#endif  // FULLSHARD_IO_PICKLE_READER_H_
