#ifndef FULLSHARD_TOOLS_CHECKPOINT_LISTING_H_
#define FULLSHARD_TOOLS_CHECKPOINT_LISTING_H_

#include <cstdint>
#include <string>

#include "fullshard/io/checkpoint_reader.h"

namespace fullshard {

// Lists names, dtypes, shapes, sizes and metadata of a checkpoint as a table.
// Characters that a terminal would obey are escaped; long values are cut.
std::string checkpoint_table(const CheckpointReader& checkpoint);

// The same, complete, as one JSON object: path, format, num_tensors, num_bytes,
// metadata, and of each tensor name, dtype, shape, num_bytes and, where it is
// another one's storage again, tied_to.
std::string checkpoint_json(const CheckpointReader& checkpoint);

// "12 bytes", "3.5 MiB".
std::string readable_bytes(int64_t num_bytes);

}  // namespace fullshard

#endif  // FULLSHARD_TOOLS_CHECKPOINT_LISTING_H_
