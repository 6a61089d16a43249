#ifndef FULLSHARD_SHARDING_UNIT_H_
#define FULLSHARD_SHARDING_UNIT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "fullshard/sharding/flat_parameter.h"

namespace fullshard::internal {

enum class UnitState {
  kSharded,    // Holds no unsharded memory.
  kGathering,  // Has memory; the shards of other ranks are on their way.
  kUnsharded,  // The parameters can be read.
};

// The parameters that one wrap decision owns, and where they are now. State
// changes only in ShardedState; see sharding/sharded_state.h.
class Unit {
 public:
  std::string name;  // The module's path; "root" for the root.
  int index = 0;     // In module order, parents first; the same on all ranks.
  class ShardedState* model = nullptr;
  Unit* parent = nullptr;  // The enclosing unit.
  bool has_children = false;
  bool reshard_after_forward = true;
  at::ScalarType reduce_dtype = at::kFloat;  // Of gradients, on their way.

  std::vector<c10::intrusive_ptr<FlatParameter>> flats;
  std::shared_ptr<torch::autograd::Node> sink;  // Null if all is frozen.

  UnitState state = UnitState::kSharded;
  uint64_t gathered_generation = 0;
  std::weak_ptr<void> keeper;  // [Note: Units kept for a recompute]
  // Stayed unsharded after a forward, and the user may write to its shards: the
  // next forward gathers it again, backward does not.
  bool watched = false;
  bool pinned = false;  // Unsharded by request.
  // Explicit prefetches, by Prefetcher::Phase.
  std::vector<Unit*> prefetch[2];

  // Where the unit's unsharded memory is while state != kSharded. The
  // transport's bookkeeping.
  struct Slot {
    char* memory = nullptr;
    int index = -1;
    at::Tensor private_memory;    // Set if it moved out of a shared slot.
    bool shared_masters = false;  // [Note: Shared master shards]
  } slot;

  // Unsharded gradients, of reduce_bytes(), kept under no_sync.
  at::Tensor unreduced_gradients;
  // Gradient shards that wait for the replicas' all-reduce, by flat parameter.
  std::vector<at::Tensor> unreduced_shards;
  bool used_in_forward = false;  // By this rank, since the last backward.
  // In the backward that is under way:
  bool reduced_this_backward = false;
  bool came_early = false;  // Waits in unreduced_gradients for its turn.

  // A flat parameter's bytes begin here within the unit's slot memory.
  int64_t slot_offset(size_t flat) const;
  int64_t slot_bytes() const;
  // The same for the reduce buffer, which holds the trainable ones.
  int64_t reduce_offset(size_t flat) const;
  int64_t reduce_bytes() const;

  // Writes this rank's slices to slot.memory.
  void write_own_slices() const;

  bool trainable() const { return sink != nullptr; }
  bool has_views() const;
  uint64_t generation() const;
  bool handed_out() const;
  // Whether one of the two encloses the other in the module tree.
  bool related_to(const Unit& other) const;
  std::string misuse();
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_UNIT_H_
