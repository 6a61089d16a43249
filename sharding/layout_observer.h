#ifndef FULLSHARD_SHARDING_LAYOUT_OBSERVER_H_
#define FULLSHARD_SHARDING_LAYOUT_OBSERVER_H_

namespace fullshard::internal {

class Unit;

// Keeps tensors that are split as the trainable flat parameters are, and so
// must follow when a unit's are laid out anew. Layout calls are collective.
class LayoutObserver {
 public:
  virtual ~LayoutObserver() = default;
  // Last call with the old flat parameters.
  virtual void before_layout_change(const Unit& unit) = 0;
  // First call with the new ones, of the same values.
  virtual void after_layout_change(const Unit& unit) = 0;
  // Views of gradient shards are to be let go.
  virtual void before_gradients_are_freed() {}
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_LAYOUT_OBSERVER_H_
