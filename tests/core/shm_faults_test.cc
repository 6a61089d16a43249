// What shared-memory groups do when ranks die, are late, or disagree, and how
// unrelated processes meet.

#include <dirent.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/shm_backend.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::collect_processes;
using testing::collect_ranks;
using testing::expect_success;
using testing::RankOutcome;
using testing::RunRanksOptions;
using Clock = std::chrono::steady_clock;

void expect_text(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

void all_reduce(ProcessGroups& groups, int64_t numel = 4) {
  std::vector<at::Tensor> tensors = {at::zeros({numel})};
  groups.world()->allreduce(tensors)->wait();
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

std::set<std::string> shared_memory_files() {
  std::set<std::string> names;
  DIR* directory = opendir("/dev/shm");
  if (directory == nullptr) return names;
  while (dirent* entry = readdir(directory)) {
    if (std::string(entry->d_name).find("fullshard") != std::string::npos) {
      names.insert(entry->d_name);
    }
  }
  closedir(directory);
  return names;
}

TEST(ShmFaultsTest, KilledPeerIsNamedAtOnce) {
  const auto outcomes = collect_ranks(3, [](ProcessGroups& groups) {
    all_reduce(groups);
    if (groups.rank() == 1) raise(SIGKILL);
    const auto start = Clock::now();
    const std::string error = error_of([&] { all_reduce(groups, 100000); });
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(2));
    expect_text(error, "rank 1 (pid ");
    expect_text(error, " gone: rank ");
    expect_text(error, "cannot finish all_reduce #2");
  });
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  EXPECT_EQ(outcomes[0].exit_code, 0) << outcomes[0].output;
  EXPECT_EQ(outcomes[2].exit_code, 0) << outcomes[2].output;
  EXPECT_TRUE(shared_memory_files().empty());
}

TEST(ShmFaultsTest, PeerThatLeavesAfterItsPartIsNoError) {
  expect_success(collect_ranks(3, [](ProcessGroups& groups) {
    ShmBackend* shm = ProcessGroups::shm(groups.world());
    std::unique_ptr<ShmSignals> signals = shm->make_signals(1);
    signals->post(0, 7);
    if (groups.rank() == 2) _exit(0);
    signals->wait_all(0, 7, "farewell");
    EXPECT_EQ(signals->value(0, 2), 7u);
  }));
}

TEST(ShmFaultsTest, AbortFailsTheOthers) {
  expect_success(collect_ranks(2, [](ProcessGroups& groups) {
    if (groups.rank() == 0) {
      groups.world()->abort();
    } else {
      expect_text(error_of([&] { all_reduce(groups); }), "rank 0");
    }
  }));
}

TEST(ShmFaultsTest, LateRankIsNamedWithOperationAndUnit) {
  const int others_done = eventfd(0, EFD_SEMAPHORE);
  RunRanksOptions options;
  options.collective_timeout = std::chrono::milliseconds(300);
  expect_success(collect_ranks(
      3,
      [&](ProcessGroups& groups) {
        std::unique_ptr<ShmSignals> signals =
            ProcessGroups::shm(groups.world())->make_signals(1);
        uint64_t one = 1;
        if (groups.rank() == 2) {
          for (int i = 0; i < 2; ++i) {
            ASSERT_EQ(read(others_done, &one, sizeof(one)), 8);
          }
          return;
        }
        const std::string unit = "llm.layers.3";
        CollectiveScope scope("reduce_scatter", &unit, 418);
        const std::string error = error_of([&] { all_reduce(groups); });
        expect_text(error,
                    "rank 2 did not arrive at reduce_scatter #418 of unit "
                    "llm.layers.3");
        expect_text(error, "within 300 ms");
        signals->post(0, 1);
        expect_text(
            error_of([&] { signals->wait_all(0, 1, "releasing slot 2"); }),
            "rank 2 did not arrive at reduce_scatter #418 of unit "
            "llm.layers.3 (releasing slot 2) within 300 ms");
        ASSERT_EQ(write(others_done, &one, sizeof(one)), 8);
      },
      options));
  close(others_done);
}

TEST(ShmFaultsTest, MissingRankIsNamedAtTheRendezvous) {
  const auto outcomes = collect_processes(3, [](const LaunchEnv& env) {
    if (env.rank == 2) return;
    ProcessGroupsOptions options;
    options.backend = "shm";
    options.timeout = std::chrono::milliseconds(300);
    absl::StatusOr<ProcessGroups> groups = init_process_groups(env, options);
    ASSERT_FALSE(groups.ok());
    if (env.rank == 0) {
      EXPECT_EQ(groups.status().code(), absl::StatusCode::kDeadlineExceeded);
      expect_text(groups.status().ToString(),
                  "rank 2 did not come to the rendezvous");
    }
  });
  expect_success(outcomes);
}

TEST(ShmFaultsTest, DisagreementOnTheWorldSizeIsNamed) {
  const auto outcomes = collect_processes(2, [](LaunchEnv env) {
    if (env.rank == 1) env.world_size = env.local_world_size = 3;
    ProcessGroupsOptions options;
    options.backend = "shm";
    absl::StatusOr<ProcessGroups> groups = init_process_groups(env, options);
    ASSERT_FALSE(groups.ok());
    if (env.rank == 0) {
      expect_text(groups.status().ToString(), "expected 2 ranks, but pid ");
      expect_text(groups.status().ToString(), "calls itself 1 of 3");
    }
  });
  expect_success(outcomes);
}

TEST(ShmFaultsTest, DifferentSizesOfSharedMemoryAreNamed) {
  expect_success(collect_ranks(2, [](ProcessGroups& groups) {
    const std::string error = error_of([&] {
      ProcessGroups::shm(groups.world())
          ->allocate_shared(groups.rank() == 0 ? 100 : 200);
    });
    expect_text(error, "share_memory #1 of 200 bytes per rank");
  }));
}

TEST(ShmFaultsTest, MemoryHasNoNameInAnyFileSystem) {
  expect_success(collect_ranks(2, [](ProcessGroups& groups) {
    at::Tensor region =
        ProcessGroups::shm(groups.world())->allocate_shared(1 << 20);
    region.fill_(1);
    std::ifstream maps("/proc/self/maps");
    std::stringstream text;
    text << maps.rdbuf();
    expect_text(text.str(), "/memfd:fullshard (deleted)");
    EXPECT_EQ(text.str().find("/dev/shm"), std::string::npos);
  }));
}

// Run by SeparatelyStartedProcessesMeet in processes of their own; in this one,
// a world of one.
TEST(ShmSeparateProcessTest, JoinsTheWorldOfItsEnvironment) {
  absl::StatusOr<ProcessGroups> groups =
      init_process_groups(LaunchEnv::from_environment());
  ASSERT_TRUE(groups.ok()) << groups.status();
  const int n = groups->world_size();
  EXPECT_EQ(groups->backend(), n == 1 ? "single" : "shm");
  std::vector<at::Tensor> tensors = {at::full({3}, groups->rank() + 1.0)};
  groups->world()->allreduce(tensors);
  EXPECT_EQ(tensors[0][0].item<double>(), n * (n + 1) / 2);
}

TEST(ShmSeparateProcessTest, SeparatelyStartedProcessesMeet) {
  expect_success(collect_processes(3, [](const LaunchEnv& env) {
    setenv("RANK", absl::StrCat(env.rank).c_str(), 1);
    setenv("WORLD_SIZE", "3", 1);
    setenv("LOCAL_RANK", absl::StrCat(env.rank).c_str(), 1);
    setenv("LOCAL_WORLD_SIZE", "3", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", absl::StrCat(env.master_port).c_str(), 1);
    execl("/proc/self/exe", "shm_faults_test",
          "--gtest_filter=*JoinsTheWorldOfItsEnvironment", nullptr);
    FAIL() << "exec failed";
  }));
}

}  // namespace
}  // namespace fullshard
