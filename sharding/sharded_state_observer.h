#ifndef FULLSHARD_SHARDING_SHARDED_STATE_OBSERVER_H_
#define FULLSHARD_SHARDING_SHARDED_STATE_OBSERVER_H_

namespace fullshard::internal {

class Unit;

// Reads master shards at times of its own, or keeps tensors that are split as the
// trainable flat parameters are, and so must follow when a unit's are laid out
// anew. Layout calls are collective.
class ShardedStateObserver {
 public:
  virtual ~ShardedStateObserver() = default;
  // Master shards, or what an optimizer keeps for them, are about to change.
  // From the thread that changes them.
  virtual void before_update() {}
  // Last call with the old flat parameters.
  virtual void before_layout_change(const Unit& /*unit*/) {}
  // First call with the new ones, of the same values.
  virtual void after_layout_change(const Unit& /*unit*/) {}
  // Views of gradient shards are to be let go.
  virtual void before_gradients_are_freed() {}
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_SHARDED_STATE_OBSERVER_H_
