#ifndef FULLSHARD_CORE_SHM_SIGNALS_H_
#define FULLSHARD_CORE_SHM_SIGNALS_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/strings/string_view.h"

namespace fullshard {

namespace internal {
class SharedMapping;
class ShmPeers;
}  // namespace internal

// Counters that the ranks of a host post to each other in shared memory.
//
// Each rank owns one counter per signal and only ever raises it; the others
// wait for values. Comparisons are on the signed difference, so that counters
// may wrap as long as no rank is 2^31 ahead. A satisfied wait is one load per
// rank; an unsatisfied one spins briefly and then sleeps in the kernel.
//
// Memory ordering: what a rank wrote before post() is seen by whoever returned
// from a wait for that value.
//
// Thread safety: one thread of a rank may post a given signal at a time.
//
// Example:
//   signals->post(kWritten, step);              // my slice is in place
//   signals->wait_all(kWritten, step, "all_gather");  // and everyone's
class ShmSignals {
 public:
  // All counters start at 0.
  //
  // Requires: `memory` is zeroed and holds num_bytes(num_signals, ranks).
  ShmSignals(std::shared_ptr<internal::ShmPeers> peers,
             std::unique_ptr<internal::SharedMapping> memory, int num_signals);
  ~ShmSignals();
  ShmSignals(const ShmSignals&) = delete;
  ShmSignals& operator=(const ShmSignals&) = delete;

  static size_t num_bytes(int num_signals, int num_ranks);

  // Sets this rank's counter, and first its tag, and wakes who waits for it.
  void post(int signal, uint32_t value, uint32_t tag = 0) {
    Cell& cell = this->cell(signal, rank_);
    cell.tag.store(tag, std::memory_order_relaxed);
    // Sequentially consistent with the waiter's count-then-look.
    cell.value.store(value, std::memory_order_seq_cst);
    if (cell.waiters.load(std::memory_order_seq_cst) != 0) wake(cell);
  }

  uint32_t value(int signal, int rank) const {
    return cell(signal, rank).value.load(std::memory_order_acquire);
  }
  // The tag of the last post, or of a later one.
  uint32_t tag(int signal, int rank) const {
    return cell(signal, rank).tag.load(std::memory_order_relaxed);
  }
  bool reached(int signal, int rank, uint32_t value) const {
    return static_cast<int32_t>(this->value(signal, rank) - value) >= 0;
  }

  // Returns when every rank's counter, ours included, has reached `value`.
  //
  // Errors: c10::DistBackendError naming the ranks that are gone (at once) or
  // late (after the group's time-out), `what` and the CollectiveScope.
  void wait_all(int signal, uint32_t value, absl::string_view what) {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (!reached(signal, rank, value)) {
        wait_slowly(signal, rank, value, what, /*all=*/true);
      }
    }
  }

  // Returns when the counter of `rank` has reached `value`. Errors as above.
  void wait_rank(int signal, int rank, uint32_t value, absl::string_view what) {
    if (!reached(signal, rank, value)) {
      wait_slowly(signal, rank, value, what, /*all=*/false);
    }
  }

  int num_ranks() const { return num_ranks_; }
  int rank() const { return rank_; }

 private:
  // One cache line, so that ranks do not disturb each other.
  struct alignas(64) Cell {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> tag;
    std::atomic<uint32_t> waiters;
  };
  static_assert(std::atomic<uint32_t>::is_always_lock_free,
                "counters are shared between processes");

  Cell& cell(int signal, int rank) {
    return cells_[signal * num_ranks_ + rank];
  }
  const Cell& cell(int signal, int rank) const {
    return cells_[signal * num_ranks_ + rank];
  }
  static void wake(Cell& cell);
  void wait_slowly(int signal, int rank, uint32_t value, absl::string_view what,
                   bool all);
  void sleep_until_reached(int signal, int rank, uint32_t value,
                           absl::string_view what, bool all);
  void check_peers(int signal, int rank, uint32_t value, absl::string_view what,
                   bool all, bool timed_out) const;

  Cell* cells_;
  int num_ranks_;
  int rank_;
  int num_signals_;
  std::shared_ptr<internal::ShmPeers> peers_;
  std::unique_ptr<internal::SharedMapping> memory_;
};

}  // namespace fullshard

#endif  // FULLSHARD_CORE_SHM_SIGNALS_H_
