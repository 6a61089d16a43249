#include "fullshard/core/watchdog.h"

#include <unistd.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "fullshard/core/logging.h"

namespace fullshard {
namespace {

using Clock = std::chrono::steady_clock;

struct Watched {
  Clock::time_point deadline;
  std::chrono::milliseconds timeout;
  std::string description;
};

class Watchdog {
 public:
  // Never destroyed: its thread runs until the process ends.
  static Watchdog& instance() {
    static Watchdog* watchdog = new Watchdog;
    return *watchdog;
  }

  uint64_t add(Watched watched) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!running_) {
      running_ = true;
      std::thread([this] { run(); }).detach();
    }
    uint64_t id = next_id_++;
    bool earliest = waits_.empty() || watched.deadline < wake_at_;
    waits_.emplace(id, std::move(watched));
    if (earliest) changed_.notify_one();
    return id;
  }

  void remove(uint64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    waits_.erase(id);
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      Clock::time_point now = Clock::now();
      wake_at_ = now + std::chrono::hours(1);
      for (const auto& [id, watched] : waits_) {
        if (watched.deadline <= now) end_process(watched);
        wake_at_ = std::min(wake_at_, watched.deadline);
      }
      changed_.wait_until(lock, wake_at_);
    }
  }

  [[noreturn]] static void end_process(const Watched& watched) {
    log_error(absl::StrCat("the watchdog ends this rank: ", watched.description,
                           " did not finish within ",
                           describe_duration(watched.timeout)));
    _exit(kWatchdogExitCode);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Watched> waits_;
  Clock::time_point wake_at_{};
  uint64_t next_id_ = 0;
  bool running_ = false;
};

std::mutex g_on_failure_mutex;
// Never destroyed: a scope may fail while the process ends.
auto& g_on_failure = *new std::function<void(const std::string&)>;

}  // namespace

void CollectiveScope::watch(
    std::function<void(const std::string& collective)> on_failure) {
  std::lock_guard<std::mutex> lock(g_on_failure_mutex);
  g_on_failure = std::move(on_failure);
  watched_ = g_on_failure != nullptr;
}

void CollectiveScope::report_failure() noexcept {
  std::lock_guard<std::mutex> lock(g_on_failure_mutex);
  if (!watched_.exchange(false)) return;
  try {
    g_on_failure(describe());
  } catch (const std::exception& error) {
    log_error(error.what());
  }
}

std::string CollectiveScope::describe() {
  const CollectiveScope* scope = current_;
  if (scope == nullptr) return "";
  for (const CollectiveScope* s = scope; s != nullptr; s = s->outer_) {
    if (s->unit_ != nullptr) {
      scope = s;
      break;
    }
  }
  std::string text = absl::StrCat(scope->operation_, " #", scope->sequence_);
  if (scope->unit_ != nullptr)
    absl::StrAppend(&text, " of unit ", *scope->unit_);
  return text;
}

std::string describe_wait(absl::string_view what) {
  std::string scope = CollectiveScope::describe();
  if (scope.empty()) return std::string(what);
  if (what.empty() ||
      scope.compare(0, what.size(), what.data(), what.size()) == 0) {
    return scope;
  }
  return absl::StrCat(scope, " (", what, ")");
}

std::string describe_duration(std::chrono::milliseconds duration) {
  if (duration.count() % 1000 != 0) {
    return absl::StrCat(duration.count(), " ms");
  }
  return absl::StrCat(duration.count() / 1000, " s");
}

WatchedWait::WatchedWait(absl::string_view what,
                         std::chrono::milliseconds timeout)
    : id_(Watchdog::instance().add(
          {Clock::now() + timeout, timeout, describe_wait(what)})) {}

WatchedWait::~WatchedWait() { Watchdog::instance().remove(id_); }

}  // namespace fullshard
