#ifndef FULLSHARD_SHARDING_BACKWARD_ORDER_H_
#define FULLSHARD_SHARDING_BACKWARD_ORDER_H_

#include <cstddef>
#include <utility>
#include <vector>

namespace fullshard::internal {

// A collective of a backward.
struct Issue {
  int unit = 0;          // By index.
  bool reduces = false;  // Else gathers.
};

inline bool operator==(const Issue& a, const Issue& b) {
  return a.unit == b.unit && a.reduces == b.reduces;
}

// In which order every rank issues the collectives of a backward, and how far
// this one is. See [Note: Ranks on different paths].
class BackwardOrder {
 public:
  // What is known of the order.
  enum class Stage {
    kModules,     // Reductions, as the modules lie, backwards.
    kReductions,  // Reductions, as rank 0's first backward reached them.
    kComplete,    // Gathers too, as rank 0 issued them.
  };

  void set(Stage stage, std::vector<Issue> issues) {
    stage_ = stage;
    issues_ = std::move(issues);
    cursor_ = 0;
  }
  Stage stage() const { return stage_; }
  bool complete() const { return stage_ == Stage::kComplete; }
  const std::vector<Issue>& issues() const { return issues_; }

  void begin() { cursor_ = 0; }
  size_t cursor() const { return cursor_; }
  const Issue* next() const {
    return cursor_ < issues_.size() ? &issues_[cursor_] : nullptr;
  }
  Issue take() { return issues_[cursor_++]; }
  // The place of `issue` from the cursor on, or -1.
  std::ptrdiff_t find(const Issue& issue) const {
    for (size_t i = cursor_; i < issues_.size(); ++i) {
      if (issues_[i] == issue) return static_cast<std::ptrdiff_t>(i);
    }
    return -1;
  }

 private:
  Stage stage_ = Stage::kModules;
  std::vector<Issue> issues_;
  size_t cursor_ = 0;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_BACKWARD_ORDER_H_
