#ifndef FULLSHARD_CORE_WATCHDOG_H_
#define FULLSHARD_CORE_WATCHDOG_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "absl/strings/string_view.h"

namespace fullshard {

// Names, for error messages, what this thread communicates about while the
// object lives: "reduce_scatter #418 of unit llm.layers.3".
//
// Costs a few stores; nothing is formatted unless a wait fails. Scopes nest; an
// inner scope without a unit keeps the outer scope's description, so a backend
// can name its own collectives without hiding the engine's words.
//
// Lifetime: `operation` and `unit` (may be null) must outlive the object.
class CollectiveScope {
 public:
  CollectiveScope(const char* operation, const std::string* unit,
                  uint64_t sequence)
      : operation_(operation),
        unit_(unit),
        sequence_(sequence),
        outer_(current_),
        exceptions_(std::uncaught_exceptions()) {
    current_ = this;
  }
  ~CollectiveScope() {
    if (watched_ && std::uncaught_exceptions() > exceptions_) report_failure();
    current_ = outer_;
  }
  CollectiveScope(const CollectiveScope&) = delete;
  CollectiveScope& operator=(const CollectiveScope&) = delete;

  // Describes the scope this thread is in; empty outside of any.
  static std::string describe();

  // From now on the first scope that an exception leaves calls `on_failure`
  // with its description. Null: no longer. One at a time per process.
  static void watch(
      std::function<void(const std::string& collective)> on_failure);

 private:
  static void report_failure() noexcept;
  static inline thread_local const CollectiveScope* current_ = nullptr;
  static inline std::atomic<bool> watched_{false};

  const char* const operation_;
  const std::string* const unit_;
  const uint64_t sequence_;
  const CollectiveScope* const outer_;
  const int exceptions_;
};

// Returns "what", the scope of this thread, or both where they differ.
std::string describe_wait(absl::string_view what);

// Returns "300 s" or "250 ms".
std::string describe_duration(std::chrono::milliseconds duration);

// Exit status of a process that the watchdog ended (EX_TEMPFAIL).
constexpr int kWatchdogExitCode = 75;

// Ends the process if the object lives longer than `timeout`, after one line
// that names the collective this thread was in.
// Meant for waits that a third party owns (Gloo, NCCL); waits in shared memory
// throw by themselves.
//
// The watchdog's thread starts with the first object and never ends; a forked
// child must not use one that its parent started.
class WatchedWait {
 public:
  WatchedWait(absl::string_view what, std::chrono::milliseconds timeout);
  ~WatchedWait();
  WatchedWait(const WatchedWait&) = delete;
  WatchedWait& operator=(const WatchedWait&) = delete;

 private:
  uint64_t id_;
};

}  // namespace fullshard

#endif  // FULLSHARD_CORE_WATCHDOG_H_
