#include "fullshard/core/shm_signals.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>
#include <vector>

#include "c10/util/Exception.h"
#include "fullshard/core/shm_memory.h"
#include "fullshard/core/shm_peers.h"
#include "fullshard/core/watchdog.h"

namespace fullshard {
namespace {

using Clock = std::chrono::steady_clock;

// About 3 us: longer than a peer on another core needs for a small copy,
// shorter than what a rank that shares our core would lose.
constexpr int kNumSpins = 200;
// Then the core goes to whoever wants it, about 50 us long: waking from the
// futex costs as much, and with more ranks than cores it is the late rank that
// runs.
constexpr int kNumYields = 100;
// How soon a waiting rank notices that a peer is gone.
constexpr timespec kLookForDeadPeers{0, 20'000'000};

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the word is shared between processes.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen,
          &kLookForDeadPeers, nullptr, 0);
}

}  // namespace

ShmSignals::ShmSignals(std::shared_ptr<internal::ShmPeers> peers,
                       std::unique_ptr<internal::SharedMapping> memory,
                       int num_signals)
    : cells_(reinterpret_cast<Cell*>(memory->data())),
      num_ranks_(peers->size()),
      rank_(peers->rank()),
      num_signals_(num_signals),
      peers_(std::move(peers)),
      memory_(std::move(memory)) {
  TORCH_INTERNAL_ASSERT(memory_->num_bytes() >=
                        num_bytes(num_signals_, num_ranks_));
}

ShmSignals::~ShmSignals() = default;

size_t ShmSignals::num_bytes(int num_signals, int num_ranks) {
  return sizeof(Cell) * num_signals * num_ranks;
}

void ShmSignals::wake(Cell& cell) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&cell.value), FUTEX_WAKE,
          INT_MAX, nullptr, nullptr, 0);
}

void ShmSignals::wait_slowly(int signal, int rank, uint32_t value,
                             absl::string_view what, bool all) {
  for (int i = 0; i < kNumSpins; ++i) {
    pause_cpu();
    if (reached(signal, rank, value)) return;
  }
  for (int i = 0; i < kNumYields; ++i) {
    sched_yield();
    if (reached(signal, rank, value)) return;
  }
  sleep_until_reached(signal, rank, value, what, all);
}

void ShmSignals::sleep_until_reached(int signal, int rank, uint32_t value,
                                     absl::string_view what, bool all) {
  struct Waiter {
    explicit Waiter(Cell& cell) : cell(cell) { cell.waiters.fetch_add(1); }
    ~Waiter() { cell.waiters.fetch_sub(1); }
    Cell& cell;
  } waiter(cell(signal, rank));
  const Clock::time_point start = Clock::now();
  Clock::time_point next_look = start + std::chrono::milliseconds(20);
  while (true) {
    const uint32_t seen = waiter.cell.value.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - value) >= 0) return;
    futex_wait(waiter.cell.value, seen);
    const Clock::time_point now = Clock::now();
    if (now < next_look) continue;
    next_look = now + std::chrono::milliseconds(20);
    check_peers(signal, rank, value, what, all,
                now - start > peers_->timeout());
  }
}

void ShmSignals::check_peers(int signal, int rank, uint32_t value,
                             absl::string_view what, bool all,
                             bool timed_out) const {
  std::vector<int> gone;
  for (int r = 0; r < num_ranks_; ++r) {
    if ((all || r == rank) && peers_->is_gone(r)) gone.push_back(r);
  }
  // Looked at after the sockets: a rank may post its last value and leave.
  std::vector<int> late, late_and_gone;
  for (int r = 0; r < num_ranks_; ++r) {
    if ((all || r == rank) && !reached(signal, r, value)) late.push_back(r);
  }
  for (int r : gone) {
    if (!reached(signal, r, value)) late_and_gone.push_back(r);
  }
  TORCH_CHECK_WITH(DistBackendError, late_and_gone.empty(),
                   peers_->names(late_and_gone, /*with_pids=*/true),
                   late_and_gone.size() == 1 ? " is" : " are",
                   " gone: ", peers_->name(rank_), " cannot finish ",
                   describe_wait(what));
  TORCH_CHECK_WITH(DistBackendError, !timed_out || late.empty(),
                   peers_->names(late, /*with_pids=*/false),
                   " did not arrive at ", describe_wait(what), " within ",
                   describe_duration(peers_->timeout()), ", says ",
                   peers_->name(rank_));
}

}  // namespace fullshard
