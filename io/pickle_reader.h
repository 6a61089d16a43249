#ifndef FULLSHARD_IO_PICKLE_READER_H_
#define FULLSHARD_IO_PICKLE_READER_H_

#include <string>

#include "absl/status/statusor.h"
#include "fullshard/io/pt_value.h"

namespace fullshard {

// Reads a protocol-2 pickle of containers, numbers, strings, OrderedDicts,
// tensors, parameters, torch.Size, dtypes and devices. Runs nothing: a pickle
// that names anything else is refused by that name.
//
// Time and memory are linear in the input; nesting is limited to 1000 levels,
// and shared values may not unfold to more than the input's size.
// Errors: PermissionDenied for a refused global; Unimplemented for another
// protocol; DataLoss for all that is malformed.
absl::StatusOr<PtValue> read_pickle(std::string bytes);

}  // namespace fullshard

#endif  // FULLSHARD_IO_PICKLE_READER_H_
