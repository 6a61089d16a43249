#include "fullshard/sharding/prefetcher.h"

#include <algorithm>

namespace fullshard::internal {

std::vector<int> Prefetcher::advance_to(int index) {
  const std::vector<int>& order = order_[phase_];
  if (!recorded_) return {};
  const auto begin = order.begin() + static_cast<std::ptrdiff_t>(cursor_);
  const auto found = std::find(begin, order.end(), index);
  if (found == order.end()) return {};
  std::vector<int> skipped(begin, found);
  cursor_ = static_cast<size_t>(found - order.begin()) + 1;
  return skipped;
}

std::vector<int> Prefetcher::take_rest() {
  if (!recorded_) return {};
  const std::vector<int>& order = order_[phase_];
  std::vector<int> rest(order.begin() + static_cast<std::ptrdiff_t>(cursor_),
                        order.end());
  cursor_ = order.size();
  return rest;
}

void Prefetcher::restart_recording() {
  if (recorded_) return;
  for (std::vector<int>& order : order_) order.clear();
  num_forwards_ = 0;
}

bool Prefetcher::finish_recording() {
  if (num_forwards_ > 1 && !recorded_twice_) {
    recorded_twice_ = true;
    restart_recording();
  } else {
    recorded_ = true;
  }
  return recorded_;
}

int Prefetcher::next() const {
  const std::vector<int>& order = order_[phase_];
  return recorded_ && cursor_ < order.size() ? order[cursor_] : -1;
}

int64_t Prefetcher::fingerprint() const {
  uint64_t hash = 0xCBF29CE484222325;  // FNV-1a
  for (const std::vector<int>& order : order_) {
    for (int index : order) {
      hash = (hash ^ static_cast<uint64_t>(index + 1)) * 0x100000001B3;
    }
    hash = hash * 0x100000001B3;
  }
  return static_cast<int64_t>(hash >> 1);
}

}  // namespace fullshard::internal
