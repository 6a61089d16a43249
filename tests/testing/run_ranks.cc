#include "fullshard/tests/testing/run_ranks.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iterator>
#include <thread>

#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace testing {
namespace {

using Clock = std::chrono::steady_clock;

struct Process {
  pid_t pid = -1;
  int output = -1;
  bool running = true;
  RankOutcome outcome;
};

int num_threads() {
  using std::filesystem::directory_iterator;
  return static_cast<int>(std::distance(directory_iterator("/proc/self/task"),
                                        directory_iterator()));
}

// Returns a file in memory for what one rank prints. A rank may start processes
// that share it: appending keeps their writes apart, a shared offset does not.
int open_output() {
  const int output = memfd_create("output", MFD_CLOEXEC);
  if (output < 0 || fcntl(output, F_SETFL, O_APPEND) != 0) {
    std::perror("no file for the output of a test's rank");
    std::abort();
  }
  return output;
}

// Listens on a free port of the loopback interface, for rank 0's store.
int open_master_port(LaunchEnv& env) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, 128) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) !=
          0) {
    std::perror("no port for the test's store");
    std::abort();
  }
  env.master_port = ntohs(address.sin_port);
  env.master_listen_fd = listener;
  return listener;
}

[[noreturn]] void run_child(const LaunchEnv& env, int output,
                            const std::function<void(const LaunchEnv&)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  at::set_num_threads(1);
  bool threw = true;
  try {
    body(env);
    threw = false;
  } catch (const std::exception& error) {
    std::printf("rank %d threw: %s\n", env.rank, error.what());
  } catch (...) {
    std::printf("rank %d threw something unknown\n", env.rank);
  }
  std::fflush(nullptr);
  _exit(threw || ::testing::Test::HasFailure() ? 1 : 0);
}

std::string read_all(int fd) {
  std::string text;
  char buffer[4096];
  ssize_t n;
  lseek(fd, 0, SEEK_SET);
  while ((n = read(fd, buffer, sizeof(buffer))) > 0) text.append(buffer, n);
  return text;
}

bool reap(Process& process) {
  int status = 0;
  if (waitpid(process.pid, &status, WNOHANG) != process.pid) return false;
  process.running = false;
  if (WIFEXITED(status)) process.outcome.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) process.outcome.signal = WTERMSIG(status);
  return true;
}

void wait_for(std::vector<Process>& processes, Clock::time_point deadline) {
  size_t running = processes.size();
  while (running > 0) {
    for (Process& process : processes) {
      if (process.running && reap(process)) --running;
    }
    if (running == 0) return;
    if (Clock::now() > deadline) {
      for (Process& process : processes) {
        if (!process.running) continue;
        process.outcome.timed_out = true;
        kill(process.pid, SIGKILL);
      }
      deadline = Clock::time_point::max();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

std::vector<RankOutcome> collect_processes(
    int num_ranks, const std::function<void(const LaunchEnv& env)>& body,
    std::chrono::milliseconds timeout) {
  static int num_jobs = 0;
  EXPECT_EQ(num_threads(), 1)
      << "tensor code ran before the ranks were forked; it belongs into body";
  LaunchEnv env;
  env.world_size = env.local_world_size = num_ranks;
  // Sandboxes have process ids of their own, so two tests may share this one;
  // the clock keeps their jobs apart.
  env.rendezvous =
      absl::StrCat("test-", getpid(), "-", num_jobs++, "-",
                   std::chrono::steady_clock::now().time_since_epoch().count());
  const int listener = open_master_port(env);
  std::fflush(nullptr);
  std::vector<Process> processes(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    Process& process = processes[rank];
    process.output = open_output();
    process.pid = fork();
    if (process.pid == 0) {
      env.rank = env.local_rank = rank;
      if (rank != 0) {
        close(listener);
        env.master_listen_fd = -1;
      }
      run_child(env, process.output, body);
    }
  }
  close(listener);
  wait_for(processes, Clock::now() + timeout);
  std::vector<RankOutcome> outcomes;
  for (Process& process : processes) {
    process.outcome.output = read_all(process.output);
    close(process.output);
    outcomes.push_back(process.outcome);
  }
  return outcomes;
}

std::vector<RankOutcome> collect_ranks(
    int num_ranks, const std::function<void(ProcessGroups& groups)>& body,
    const RunRanksOptions& options) {
  return collect_processes(
      num_ranks,
      [&](const LaunchEnv& env) {
        ProcessGroupsOptions group_options;
        group_options.backend = num_ranks == 1 ? "single" : options.backend;
        group_options.timeout = options.collective_timeout;
        group_options.shard_group_size = options.shard_group_size;
        group_options.reshard_group_size = options.reshard_group_size;
        absl::StatusOr<ProcessGroups> groups =
            init_process_groups(env, group_options);
        ASSERT_TRUE(groups.ok()) << groups.status();
        body(*groups);
      },
      options.timeout);
}

void expect_success(const std::vector<RankOutcome>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    const RankOutcome& outcome = outcomes[rank];
    if (outcome.timed_out) {
      ADD_FAILURE() << "rank " << rank << " hung; it printed:\n"
                    << outcome.output;
    } else if (outcome.signal != 0) {
      ADD_FAILURE() << "rank " << rank << " was killed by signal "
                    << outcome.signal << "; it printed:\n"
                    << outcome.output;
    } else if (outcome.exit_code != 0) {
      ADD_FAILURE() << "rank " << rank << " failed; it printed:\n"
                    << outcome.output;
    }
  }
}

void run_ranks(int num_ranks,
               const std::function<void(ProcessGroups& groups)>& body,
               const RunRanksOptions& options) {
  expect_success(collect_ranks(num_ranks, body, options));
}

}  // namespace testing
}  // namespace fullshard
