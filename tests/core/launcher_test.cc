#include "fullshard/core/launcher.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "ATen/Parallel.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::RankOutcome;
using Body = std::function<int(const LaunchEnv&)>;

// Runs a launcher in a process of its own.
RankOutcome launch(const LauncherOptions& options, const Body& body) {
  return testing::collect_processes(1, [&](const LaunchEnv&) {
    const int status = launch_ranks(options, body);
    std::fflush(nullptr);
    _exit(status);
  })[0];
}

void expect_text(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// Lets ranks wait until all of them came here.
class Meeting {
 public:
  explicit Meeting(int num_ranks)
      : num_ranks_(num_ranks), arrived_(eventfd(0, 0)) {}
  ~Meeting() { close(arrived_); }
  // Rank 0 returns when all have come.
  void arrive(int rank) {
    uint64_t count = 1;
    if (rank != 0) {
      EXPECT_EQ(write(arrived_, &count, sizeof(count)), 8);
      return;
    }
    for (int come = 1; come < num_ranks_; come += static_cast<int>(count)) {
      EXPECT_EQ(read(arrived_, &count, sizeof(count)), 8);
    }
  }

 private:
  int num_ranks_;
  int arrived_;
};

sigset_t only(int signal) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  return set;
}

int wait_for_signal(int signal) {
  const sigset_t set = only(signal);
  int got = 0;
  sigwait(&set, &got);
  return got;
}

TEST(LauncherTest, RanksFindTheirPlaceInTheEnvironment) {
  LauncherOptions options;
  options.num_ranks = 3;
  options.threads_per_rank = 2;
  RankOutcome outcome = launch(options, [](const LaunchEnv& env) {
    absl::StatusOr<LaunchEnv> read = LaunchEnv::from_environment();
    const bool same =
        read.ok() && read->rank == env.rank && read->world_size == 3 &&
        read->local_rank == env.rank && read->rendezvous == env.rendezvous &&
        read->master_port == env.master_port &&
        read->master_listen_fd == env.master_listen_fd && read->single_host();
    std::printf("rank %d same %d threads %d %s\n", env.rank, same,
                at::get_num_threads(), std::getenv("OMP_NUM_THREADS"));
    return 0;
  });
  EXPECT_EQ(outcome.exit_code, 0);
  for (const char* rank : {"0", "1", "2"}) {
    expect_text(outcome.output,
                std::string("rank ") + rank + " same 1 threads 2 2\n");
  }
}

TEST(LauncherTest, RanksFormAWorld) {
  RankOutcome outcome = launch({}, [](const LaunchEnv& env) {
    for (const char* backend : {"shm", "gloo"}) {
      ProcessGroupsOptions options;
      options.backend = backend;
      absl::StatusOr<ProcessGroups> groups = init_process_groups(env, options);
      if (!groups.ok()) {
        std::printf("%s\n", groups.status().ToString().c_str());
        return 1;
      }
      groups->world()->barrier()->wait();
    }
    return 0;
  });
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
}

TEST(LauncherTest, ReturnsTheStatusOfTheRankThatFailed) {
  LauncherOptions options;
  options.num_ranks = 3;
  RankOutcome outcome = launch(options, [](const LaunchEnv& env) {
    if (env.rank == 1) return 7;
    pause();  // until SIGTERM
    return 0;
  });
  EXPECT_EQ(outcome.exit_code, 7);
  expect_text(outcome.output, "rank 1 (pid ");
  expect_text(outcome.output, "exited with status 7");
  EXPECT_EQ(outcome.output.find("rank 0 (pid"), std::string::npos)
      << outcome.output;
}

TEST(LauncherTest, NamesTheRankThatWasKilled) {
  RankOutcome outcome = launch({}, [](const LaunchEnv& env) {
    if (env.rank == 1) raise(SIGKILL);
    pause();
    return 0;
  });
  EXPECT_EQ(outcome.exit_code, 128 + SIGKILL);
  expect_text(outcome.output, "rank 1 (pid ");
  expect_text(outcome.output, "was killed by signal 9 (Killed)");
}

TEST(LauncherTest, PrintsWhatARankThrew) {
  RankOutcome outcome = launch({}, [](const LaunchEnv& env) -> int {
    if (env.rank == 1) throw std::runtime_error("no such file");
    pause();
    return 0;
  });
  EXPECT_EQ(outcome.exit_code, 1);
  expect_text(outcome.output, "[rank 1] ");
  expect_text(outcome.output, "no such file");
}

TEST(LauncherTest, KillsRanksThatIgnoreTheEnd) {
  LauncherOptions options;
  options.grace = std::chrono::milliseconds(300);
  Meeting meeting(2);
  RankOutcome outcome = launch(options, [&](const LaunchEnv& env) {
    if (env.rank == 1) signal(SIGTERM, SIG_IGN);
    meeting.arrive(env.rank);
    if (env.rank == 0) return 3;
    while (true) pause();
  });
  EXPECT_FALSE(outcome.timed_out);
  EXPECT_EQ(outcome.exit_code, 3);
  expect_text(outcome.output, "killed");
}

TEST(LauncherTest, ForwardsInterrupts) {
  Meeting meeting(2);
  RankOutcome outcome = launch({}, [&](const LaunchEnv& env) {
    const sigset_t interrupts = only(SIGINT);
    sigprocmask(SIG_BLOCK, &interrupts, nullptr);
    meeting.arrive(env.rank);
    if (env.rank == 0) kill(getppid(), SIGINT);
    const int got = wait_for_signal(SIGINT);
    std::printf("rank %d stops on %d\n", env.rank, got);
    return 0;
  });
  EXPECT_EQ(outcome.exit_code, 0);
  expect_text(outcome.output, "rank 0 stops on 2");
  expect_text(outcome.output, "rank 1 stops on 2");
}

TEST(LauncherTest, SecondInterruptKills) {
  Meeting meeting(2);
  RankOutcome outcome = launch({}, [&](const LaunchEnv& env) {
    const sigset_t interrupts = only(SIGINT);
    sigprocmask(SIG_BLOCK, &interrupts, nullptr);
    meeting.arrive(env.rank);
    if (env.rank == 0) {
      kill(getppid(), SIGINT);
      wait_for_signal(SIGINT);
      kill(getppid(), SIGINT);
    }
    while (true) pause();
    return 0;
  });
  EXPECT_EQ(outcome.exit_code, 128 + SIGKILL);
}

TEST(LauncherTest, RanksDieWithTheLauncher) {
  RankOutcome outcome = testing::collect_processes(1, [](const LaunchEnv&) {
    int alive[2];
    ASSERT_EQ(pipe(alive), 0);
    const pid_t launcher = fork();
    if (launcher == 0) {
      _exit(launch_ranks({}, [&](const LaunchEnv&) {
        EXPECT_EQ(write(alive[1], "x", 1), 1);
        while (true) pause();
        return 0;
      }));
    }
    close(alive[1]);
    char byte;
    for (int i = 0; i < 2; ++i) ASSERT_EQ(read(alive[0], &byte, 1), 1);
    kill(launcher, SIGKILL);
    // End of file: the last rank is gone.
    EXPECT_EQ(read(alive[0], &byte, 1), 0);
    waitpid(launcher, nullptr, 0);
  })[0];
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_FALSE(outcome.timed_out);
}

TEST(LauncherTest, RefusesNoRanks) {
  LauncherOptions options;
  options.num_ranks = 0;
  RankOutcome outcome = launch(options, [](const LaunchEnv&) { return 0; });
  EXPECT_NE(outcome.exit_code, 0);
  expect_text(outcome.output, "num_ranks: expected at least 1, got 0");
}

}  // namespace
}  // namespace fullshard
