#include "fullshard/core/launcher.h"

#include <malloc.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/logging.h"

namespace fullshard {
namespace {

// A step frees and allocates the same activations again and again. By default
// malloc gives large ones back to the kernel each time, which costs thousands
// of page faults a step.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // The largest that it accepts.
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  mallopt(M_TOP_PAD, 16 << 20);
}

using Clock = std::chrono::steady_clock;

constexpr int kLaunchFailed = 70;  // EX_SOFTWARE

int num_usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

int threads_per_rank(const LauncherOptions& options) {
  if (options.threads_per_rank > 0) return options.threads_per_rank;
  const char* wanted = std::getenv("OMP_NUM_THREADS");
  const int threads = wanted == nullptr ? 0 : std::atoi(wanted);
  if (threads > 0) return threads;
  return std::max(1, num_usable_cores() / options.num_ranks);
}

// Listens on a free port of the loopback interface, for the store of rank 0.
// Returns the descriptor, or -1.
int listen_on_free_port(int* port) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (listener < 0 || bind(listener, generic, length) != 0 ||
      listen(listener, SOMAXCONN) != 0 ||
      getsockname(listener, generic, &length) != 0) {
    if (listener >= 0) close(listener);
    return -1;
  }
  *port = ntohs(address.sin_port);
  return listener;
}

sigset_t handled_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) {
    sigaddset(&signals, signal);
  }
  return signals;
}

void export_environment(const LaunchEnv& env, int threads) {
  auto set = [](const char* name, const std::string& value) {
    setenv(name, value.c_str(), /*overwrite=*/1);
  };
  set("RANK", absl::StrCat(env.rank));
  set("WORLD_SIZE", absl::StrCat(env.world_size));
  set("LOCAL_RANK", absl::StrCat(env.local_rank));
  set("LOCAL_WORLD_SIZE", absl::StrCat(env.local_world_size));
  set("MASTER_ADDR", env.master_addr);
  set("MASTER_PORT", absl::StrCat(env.master_port));
  set("FULLSHARD_RENDEZVOUS", env.rendezvous);
  set("OMP_NUM_THREADS", absl::StrCat(threads));
  if (env.master_listen_fd >= 0) {
    set("FULLSHARD_MASTER_FD", absl::StrCat(env.master_listen_fd));
  } else {
    unsetenv("FULLSHARD_MASTER_FD");
  }
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
}

// The ranks of one job, from the outside.
class Job {
 public:
  Job(const LauncherOptions& options,
      const std::function<int(const LaunchEnv&)>& body)
      : options_(options), body_(body), pids_(options.num_ranks, -1) {}

  int run() {
    LaunchEnv env;
    env.world_size = env.local_world_size = options_.num_ranks;
    env.rendezvous = absl::StrCat("job-", getpid(), "-",
                                  Clock::now().time_since_epoch().count());
    env.master_listen_fd = listen_on_free_port(&env.master_port);
    const sigset_t signals = handled_signals();
    sigprocmask(SIG_BLOCK, &signals, &old_mask_);
    signal(SIGCHLD, SIG_DFL);  // a caller that ignores it would hide deaths
    std::fflush(nullptr);
    for (int rank = 0; rank < options_.num_ranks; ++rank) start(env, rank);
    if (env.master_listen_fd >= 0) close(env.master_listen_fd);
    while (num_running_ > 0) {
      handle(next_signal());
      reap();
    }
    sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
    return result_;
  }

 private:
  void start(LaunchEnv env, int rank) {
    if (result_ != 0) return;
    env.rank = env.local_rank = rank;
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid == 0) run_rank(env, parent);
    if (pid < 0) {
      log_error(
          absl::StrCat("cannot start rank ", rank, ": ", std::strerror(errno)));
      fail(kLaunchFailed);
      return;
    }
    if (group_ == 0) group_ = pid;
    // Also done by the child: whoever comes first.
    setpgid(pid, group_);
    pids_[rank] = pid;
    ++num_running_;
  }

  [[noreturn]] void run_rank(LaunchEnv env, pid_t parent) {
    setpgid(0, group_);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    keep_freed_memory();
    if (getppid() != parent) _exit(kLaunchFailed);
    sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
    if (env.rank != 0 && env.master_listen_fd >= 0) {
      close(env.master_listen_fd);
      env.master_listen_fd = -1;
    }
    const int threads = threads_per_rank(options_);
    export_environment(env, threads);
    set_log_rank(env.rank, env.world_size);
    int status = 1;
    try {
      at::set_num_threads(threads);
      status = body_(env);
    } catch (const std::exception& error) {
      log_error(error.what());
    } catch (...) {
      log_error("something that is no std::exception was thrown");
    }
    std::fflush(nullptr);
    _exit(status);
  }

  // Returns the next signal, or 0 at the deadline.
  int next_signal() const {
    const sigset_t signals = handled_signals();
    if (deadline_ == Clock::time_point::max()) {
      return sigwaitinfo(&signals, nullptr);
    }
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(
        deadline_ - Clock::now());
    const int64_t nanoseconds = std::max<int64_t>(0, left.count());
    const timespec wait{nanoseconds / 1'000'000'000,
                        nanoseconds % 1'000'000'000};
    const int signal = sigtimedwait(&signals, nullptr, &wait);
    return signal < 0 && errno == EAGAIN ? 0 : signal;
  }

  void handle(int signal) {
    if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) {
      ++num_forwarded_;
      signal_all(num_forwarded_ == 1 ? signal : SIGKILL);
    } else if (signal == 0) {
      log_error("ranks that do not stop are killed");
      signal_all(SIGKILL);
      deadline_ = Clock::time_point::max();
    }
  }

  void signal_all(int signal) const {
    if (group_ > 0) kill(-group_, signal);
  }

  void reap() {
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
      int status = 0;
      if (pids_[rank] < 0 || waitpid(pids_[rank], &status, WNOHANG) <= 0) {
        continue;
      }
      judge(rank, status);
      pids_[rank] = -1;
      --num_running_;
    }
    // What the ranks started themselves ends with them.
    if (num_running_ == 0 && result_ != 0) signal_all(SIGKILL);
  }

  void judge(int rank, int status) {
    const bool killed = WIFSIGNALED(status);
    const int code = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (code == 0 || result_ != 0) return;
    const std::string name =
        absl::StrCat("rank ", rank, " (pid ", pids_[rank], ")");
    log_error(killed ? absl::StrCat(name, " was killed by signal ",
                                    WTERMSIG(status), " (",
                                    strsignal(WTERMSIG(status)), ")")
                     : absl::StrCat(name, " exited with status ", code));
    fail(code);
  }

  void fail(int code) {
    result_ = code;
    signal_all(SIGTERM);
    deadline_ = Clock::now() + options_.grace;
  }

  const LauncherOptions options_;
  const std::function<int(const LaunchEnv&)>& body_;
  std::vector<pid_t> pids_;
  pid_t group_ = 0;
  int num_running_ = 0;
  int num_forwarded_ = 0;
  int result_ = 0;
  Clock::time_point deadline_ = Clock::time_point::max();
  sigset_t old_mask_;
};

}  // namespace

int launch_ranks(const LauncherOptions& options,
                 const std::function<int(const LaunchEnv&)>& body) {
  if (options.num_ranks < 1) {
    log_error(absl::StrCat("num_ranks: expected at least 1, got ",
                           options.num_ranks));
    return kLaunchFailed;
  }
  return Job(options, body).run();
}

}  // namespace fullshard
