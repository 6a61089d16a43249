#ifndef FULLSHARD_ACTIVATION_CKPT_CHECKPOINT_OPTIONS_H_
#define FULLSHARD_ACTIVATION_CKPT_CHECKPOINT_OPTIONS_H_

#include <memory>
#include <string>

namespace fullshard {

class KeptOperators;  // activation_ckpt/kept_operators.h

struct CheckpointOptions {
  // Recompute with the random state of the first run, so that dropout drops
  // the same elements. Costs a copy of the generators' states.
  bool preserve_rng_state = true;
  // Compare shape, dtype and device of every tensor that the second run saves
  // with the first one's.
  bool determinism_check = true;
  // Selective checkpointing: the outputs of these operators are kept from the
  // first run, and the second one does not run them again. Null: nothing is.
  std::shared_ptr<const KeptOperators> keep;
  // Keep the inputs in host memory until they are needed. (Where they are
  // there already, they are copied all the same.) Frames inside others do not:
  // what they would keep is recomputed.
  bool offload_inputs = false;
  // Of the module, for messages.
  std::string name;
};

}  // namespace fullshard

#endif  // FULLSHARD_ACTIVATION_CKPT_CHECKPOINT_OPTIONS_H_
