#include "fullshard/full_checkpoint.h"
#include "fullshard/io/read_elements.h"

namespace fullshard {

absl::Status load_full_checkpoint(ShardedModule& model,
                                  const TensorSource& source,
                                  const LoadOptions& options) {
  LoadOptions reading = options;
  reading.read = &read_elements;
  reading.read_ahead = &read_elements_ahead;
  return model.load_full_state_dict(source, reading);
}

}  // namespace fullshard
