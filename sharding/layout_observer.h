#ifndef FULLSHARD_SHARDING_LAYOUT_OBSERVER_H_
#define FULLSHARD_SHARDING_LAYOUT_OBSERVER_H_

namespace fullshard::internal {

class Unit;

// Keeps tensors that are split as the trainable flat parameters are, and so
// must follow when a unit's are laid out anew. Both calls are collective.
class LayoutObserver {
 public:
  virtual ~LayoutObserver() = default;
  // Last call with the old flat parameters.
  virtual void before_layout_change(const Unit& unit) = 0;
  // First call with the new ones, of the same values.
  virtual void after_layout_change(const Unit& unit) = 0;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_LAYOUT_OBSERVER_H_
