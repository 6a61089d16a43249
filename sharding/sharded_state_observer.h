#ifndef FULLSHARD_SHARDING_SHARDED_STATE_OBSERVER_H_
#define FULLSHARD_SHARDING_SHARDED_STATE_OBSERVER_H_

namespace fullshard::internal {

class Unit;

// Is told before master shards change, for it reads them at times of its own,
// or before a unit is laid out anew, for it keeps tensors that are split as its
// trainable flat parameters are. Layout calls are collective.
class ShardedStateObserver {
 public:
  virtual ~ShardedStateObserver() = default;
  // Master shards, or what is kept for them, are about to change. May block. On
  // the thread that changes them (in backward, autograd's), maybe under the
  // state's lock: calls neither the state nor a collective.
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
