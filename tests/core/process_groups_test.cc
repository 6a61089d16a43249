#include "fullshard/core/process_groups.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "fullshard/core/device.h"
#include "fullshard/core/shm_backend.h"
#include "fullshard/core/single_backend.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/tests/testing/counting_backend.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using c10d::ReduceOp;
using testing::run_ranks;
using testing::RunRanksOptions;

void expect_text(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

int64_t sum_of_ranks(const ProcessGroups::Group& group, int rank) {
  std::vector<at::Tensor> tensors = {at::full({3}, rank)};
  group->allreduce(tensors)->wait();
  return tensors[0][0].item<int64_t>();
}

RunRanksOptions with_backend(const std::string& backend, int shard = 0) {
  RunRanksOptions options;
  options.backend = backend;
  options.shard_group_size = shard;
  return options;
}

void expect_error(const LaunchEnv& env, const ProcessGroupsOptions& options,
                  absl::StatusCode code, const std::string& text) {
  absl::StatusOr<ProcessGroups> groups = init_process_groups(env, options);
  ASSERT_FALSE(groups.ok());
  EXPECT_EQ(groups.status().code(), code);
  expect_text(groups.status().ToString(), text);
}

LaunchEnv world_of(int world_size, int local_world_size) {
  LaunchEnv env;
  env.world_size = world_size;
  env.local_world_size = local_world_size;
  return env;
}

TEST(ProcessGroupsErrorTest, UnknownBackendListsTheKnown) {
  ProcessGroupsOptions options;
  options.backend = "mpi";
  expect_error({}, options, absl::StatusCode::kInvalidArgument,
               "expected shm, gloo, shm+gloo, nccl, single, fake or nothing "
               "(automatic), got 'mpi'");
}

TEST(ProcessGroupsErrorTest, BackendThatCannotServeTheWorld) {
  ProcessGroupsOptions options;
  options.backend = "shm";
  expect_error(world_of(4, 2), options, absl::StatusCode::kFailedPrecondition,
               "expected all 4 ranks on one host, got 2");
  options.backend = "single";
  expect_error(world_of(2, 2), options, absl::StatusCode::kFailedPrecondition,
               "expected a world of 1 rank, got 2");
  options.backend = "nccl";
  expect_error(world_of(64, 64), options, absl::StatusCode::kFailedPrecondition,
               "backend nccl: ");
  options.backend = "gloo";
  expect_error(world_of(2, 2), options, absl::StatusCode::kFailedPrecondition,
               "MASTER_PORT");
}

TEST(ProcessGroupsErrorTest, ShardGroupMustDivideTheWorld) {
  ProcessGroupsOptions options;
  options.shard_group_size = 3;
  expect_error(world_of(4, 4), options, absl::StatusCode::kInvalidArgument,
               "shard_group_size: expected a divisor of the 4 ranks of the "
               "world, got 3");
}

TEST(ProcessGroupsTest, AutomaticBackendOfOneHostIsSharedMemory) {
  run_ranks(
      2,
      [](ProcessGroups& groups) {
        EXPECT_EQ(groups.backend(), "shm");
        EXPECT_TRUE(groups.device().is_cpu());
        EXPECT_NE(ProcessGroups::shm(groups.world()), nullptr);
        EXPECT_EQ(groups.shard_group(), groups.world());
        EXPECT_EQ(groups.replicate_group()->getSize(), 1);
        EXPECT_EQ(ProcessGroups::shm(groups.replicate_group()), nullptr);
      },
      with_backend(""));
}

TEST(ProcessGroupsTest, WorldOfOneIsSingle) {
  run_ranks(1, [](ProcessGroups& groups) {
    EXPECT_EQ(groups.backend(), "single");
    at::Tensor output = at::zeros({3}), input = at::ones({3});
    groups.world()->_reduce_scatter_base(output, input)->wait();
    EXPECT_TRUE(output.equal(input));
    at::Tensor gathered = at::zeros({3});
    groups.world()->_allgather_base(gathered, input)->wait();
    EXPECT_TRUE(gathered.equal(input));
    EXPECT_EQ(sum_of_ranks(groups.world(), 5), 5);
    groups.world()->barrier()->wait();
  });
}

// Rank 5 of 1,024, in groups of 8, without the other 1,023.
TEST(ProcessGroupsTest, FakeWorldOfAnySize) {
  testing::expect_success(testing::collect_processes(1, [](const LaunchEnv&) {
    LaunchEnv env = world_of(1024, 8);
    env.rank = env.local_rank = 5;
    ProcessGroupsOptions options;
    options.backend = "fake";
    options.shard_group_size = 8;
    absl::StatusOr<ProcessGroups> groups = init_process_groups(env, options);
    ASSERT_TRUE(groups.ok()) << groups.status();
    EXPECT_EQ(groups->world()->getSize(), 1024);
    EXPECT_EQ(groups->shard_group()->getSize(), 8);
    EXPECT_EQ(groups->shard_group()->getRank(), 5);
    EXPECT_EQ(groups->replicate_group()->getSize(), 128);
    EXPECT_EQ(groups->replicate_group()->getRank(), 0);
    EXPECT_EQ(sum_of_ranks(groups->world(), 5), 5 * 1024);
    at::Tensor input = at::arange(16), chunk = at::zeros({2}, at::kLong);
    groups->shard_group()->_reduce_scatter_base(chunk, input)->wait();
    EXPECT_TRUE(chunk.equal(at::tensor({80, 88}, at::kLong)));
    at::Tensor full = at::zeros({16}, at::kLong);
    groups->shard_group()->_allgather_base(full, chunk)->wait();
    EXPECT_TRUE(full.equal(chunk.repeat({8})));
  }));
}

TEST(ProcessGroupsTest, HybridMeshes) {
  for (const char* backend : {"shm", "gloo"}) {
    for (int shard : {1, 2, 4}) {
      run_ranks(
          4,
          [&](ProcessGroups& groups) {
            const int rank = groups.rank();
            int64_t shard_sum = 0, replicate_sum = 0;
            for (int r = 0; r < 4; ++r) {
              if (r / shard == rank / shard) shard_sum += r;
              if (r % shard == rank % shard) replicate_sum += r;
            }
            EXPECT_EQ(groups.shard_group()->getSize(), shard);
            EXPECT_EQ(groups.replicate_group()->getSize(), 4 / shard);
            EXPECT_EQ(groups.shard_group()->getRank(), rank % shard);
            EXPECT_EQ(sum_of_ranks(groups.shard_group(), rank), shard_sum);
            EXPECT_EQ(sum_of_ranks(groups.replicate_group(), rank),
                      replicate_sum);
            EXPECT_EQ(sum_of_ranks(groups.world(), rank), 6);
          },
          with_backend(backend, shard));
    }
  }
}

class GlooTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GlooTest, ::testing::Values(2, 3));

TEST_P(GlooTest, CollectivesOfTheEngine) {
  run_ranks(
      GetParam(),
      [](ProcessGroups& groups) {
        const int n = groups.world_size(), rank = groups.rank();
        EXPECT_EQ(groups.backend(), "gloo");
        for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
          at::Tensor gathered = at::zeros({4 * n}, dtype);
          at::Tensor slice = at::full({4}, rank + 1, dtype);
          groups.world()->_allgather_base(gathered, slice)->wait();
          at::Tensor reduced = at::zeros({4}, dtype);
          groups.world()->_reduce_scatter_base(reduced, gathered)->wait();
          for (int r = 0; r < n; ++r) {
            EXPECT_EQ(gathered[4 * r + 3].item<float>(), r + 1);
          }
          EXPECT_EQ(reduced[0].item<float>(), n * (rank + 1));
        }
        std::vector<at::Tensor> news = {at::full({5}, rank)};
        c10d::BroadcastOptions from_last;
        from_last.rootRank = n - 1;
        groups.world()->broadcast(news, from_last)->wait();
        EXPECT_EQ(news[0][4].item<int64_t>(), n - 1);
      },
      with_backend("gloo"));
}

// Some versions return the sum, so FullShard itself sums and divides.
TEST_P(GlooTest, AverageIsRefusedOrRight) {
  run_ranks(
      GetParam(),
      [](ProcessGroups& groups) {
        std::vector<at::Tensor> tensors = {at::full({4}, groups.rank() + 1.0)};
        c10d::AllreduceOptions options;
        options.reduceOp = ReduceOp::AVG;
        try {
          groups.world()->allreduce(tensors, options)->wait();
        } catch (const std::exception& error) {
          std::printf("gloo refuses AVG: %s\n", error.what());
          return;
        }
        EXPECT_EQ(tensors[0][0].item<double>(),
                  (groups.world_size() + 1) / 2.0);
      },
      with_backend("gloo"));
}

TEST(WatchdogTest, EndsAWaitThatTakesTooLong) {
  const int others_done = eventfd(0, EFD_SEMAPHORE);
  RunRanksOptions options = with_backend("gloo");
  auto outcomes = testing::collect_ranks(
      2,
      [&](ProcessGroups& groups) {
        uint64_t one = 1;
        if (groups.rank() == 1) {
          // Nobody ever writes: rank 1 ends with the time-out of its own.
          WatchedWait watch("idling", std::chrono::milliseconds(1000));
          EXPECT_EQ(read(others_done, &one, sizeof(one)), 8);
        }
        const std::string unit = "llm.layers.3";
        CollectiveScope scope("all_gather", &unit, 12);
        std::vector<at::Tensor> tensors = {at::zeros({4})};
        WatchedWait watch("all_gather", std::chrono::milliseconds(200));
        groups.world()->allreduce(tensors)->wait();
      },
      options);
  EXPECT_EQ(outcomes[0].exit_code, kWatchdogExitCode);
  expect_text(outcomes[0].output,
              "all_gather #12 of unit llm.layers.3 did not finish within 200 "
              "ms");
  EXPECT_EQ(outcomes[1].exit_code, kWatchdogExitCode);
  close(others_done);
}

TEST(WatchdogTest, LeavesWaitsInTimeAlone) {
  run_ranks(1, [](ProcessGroups&) {
    for (int i = 0; i < 1000; ++i) {
      WatchedWait watch("quick", std::chrono::milliseconds(60000));
    }
  });
}

TEST(CollectiveScopeTest, DescribesTheInnermostUnit) {
  EXPECT_EQ(describe_wait("a wait"), "a wait");
  const std::string unit = "root";
  CollectiveScope outer("reduce_scatter", &unit, 3);
  EXPECT_EQ(CollectiveScope::describe(), "reduce_scatter #3 of unit root");
  {
    CollectiveScope inner("all_reduce", nullptr, 9);
    EXPECT_EQ(CollectiveScope::describe(), "reduce_scatter #3 of unit root");
    EXPECT_EQ(describe_wait("all_reduce"),
              "reduce_scatter #3 of unit root (all_reduce)");
  }
  EXPECT_EQ(describe_wait("reduce_scatter"), "reduce_scatter #3 of unit root");
}

TEST(CountingBackendTest, CountsCallsAndBytes) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto counting =
        c10::make_intrusive<testing::CountingBackend>(groups.world());
    ProcessGroups counted(groups.env(), groups.backend(), groups.device(),
                          counting, counting, groups.replicate_group());
    EXPECT_EQ(ProcessGroups::shm(counted.shard_group()), nullptr);
    at::Tensor output = at::zeros({8}), input = at::ones({4});
    counted.shard_group()->_allgather_base(output, input)->wait();
    counted.world()->_allgather_base(output, input)->wait();
    EXPECT_EQ(counting->count("all_gather").num_calls, 2);
    EXPECT_EQ(counting->count("all_gather").num_bytes, 32);
    EXPECT_EQ(counting->count("reduce_scatter").num_calls, 0);
  });
}

TEST(DeviceTest, StreamsAndEventsDoNothingOnCpu) {
  const c10::Device cpu(c10::kCPU);
  Stream compute = Stream::current(cpu);
  Stream other = Stream::create(cpu, /*high_priority=*/true);
  Event event(cpu);
  event.record(compute);
  event.wait(other);
  event.synchronize();
  EXPECT_TRUE(event.happened());
  Event moved = std::move(event);
  StreamScope scope(other);
  other.synchronize();
}

}  // namespace
}  // namespace fullshard
