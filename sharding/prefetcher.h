#ifndef FULLSHARD_SHARDING_PREFETCHER_H_
#define FULLSHARD_SHARDING_PREFETCHER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fullshard::internal {

// Remembers in which order the first iteration gathered the units, in forward
// and in backward, and says which comes next.
//
// Units are given by index. The order is fixed by the first backward that
// ends well; from then on every rank issues gathers in it, also of units that
// its own path skips, so that data-dependent paths cannot cross collectives.
class Prefetcher {
 public:
  enum Phase { kForward = 0, kBackward = 1 };

  // Starts `phase` from its beginning.
  void begin(Phase phase) {
    phase_ = phase;
    cursor_ = 0;
  }
  Phase phase() const { return phase_; }

  // Notes that unit `index` is needed now and moves behind it. Returns the
  // units of the recorded order that were passed over; empty if the unit does
  // not come any more in this phase, and then next() returns -1 until it does.
  std::vector<int> advance_to(int index);

  // Returns the units that the order still has in this phase and moves to its
  // end.
  std::vector<int> take_rest();

  // Adds a gather to the order while it is being recorded.
  void record(int index) {
    if (!recorded_) order_[phase_].push_back(index);
  }
  // Forgets what is recorded so far: that iteration failed.
  void restart_recording();
  // Call at the end of the first backward: fixes the order and returns true.
  // With several forwards before it the second backward decides, once, for some
  // may have been no part of an iteration; then returns false.
  bool finish_recording();
  // A training forward of the root begins.
  void note_forward() { ++num_forwards_; }
  bool recorded() const { return recorded_; }

  // Returns the unit that the order gathers next, or -1.
  int next() const;

  const std::vector<int>& order(Phase phase) const { return order_[phase]; }
  // A hash of both orders, for comparing ranks.
  int64_t fingerprint() const;

 private:
  std::vector<int> order_[2];
  Phase phase_ = kForward;
  size_t cursor_ = 0;
  bool recorded_ = false;
  bool recorded_twice_ = false;
  int num_forwards_ = 0;  // In the iteration that is being recorded.
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_PREFETCHER_H_
