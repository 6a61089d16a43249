// Jobs over two hosts: shared memory inside a host, Gloo across, and what the
// others say when a host disappears.

#include <signal.h>
#include <unistd.h>

#include "fullshard/core/shm_backend.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/net_hosts.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::batch;
using testing::layer_units;
using testing::NetHosts;
using testing::RankOutcome;
using testing::sgd;
using testing::shard_mlp;

// The cable and its namespaces last for the process; made once. Null, with why
// in `reason`, where this machine does not allow them.
const NetHosts* hosts(std::string* reason = nullptr) {
  static std::string why_not;
  static const std::unique_ptr<NetHosts> hosts = NetHosts::create(&why_not);
  if (reason != nullptr) *reason = why_not;
  return hosts.get();
}

class TwoHostsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (hosts(&reason) == nullptr) {
      GTEST_SKIP() << "TWO HOSTS NOT RUN: " << reason;
    }
  }
};

// How a scheduler may place ranks 0 to 3.
enum class Placement { kBlocks, kCyclic };

struct Job {
  Placement placement = Placement::kBlocks;
  std::string backend;
  int shard_group_size = 0;
  std::chrono::milliseconds timeout{20000};
};

// Runs `body` as two ranks on each host, as torchrun starts them.
std::vector<RankOutcome> collect(
    const Job& job, const std::function<void(ProcessGroups& groups)>& body) {
  static int port = 29400;
  ++port;  // The last job's may not be free yet.
  NetHosts::mend();
  return testing::collect_processes(4, [&](const LaunchEnv& given) {
    const bool blocks = job.placement == Placement::kBlocks;
    const int host = blocks ? given.rank / 2 : given.rank % 2;
    hosts()->enter(host);
    LaunchEnv env;
    env.rank = given.rank;
    env.world_size = 4;
    env.local_world_size = 2;
    env.local_rank = blocks ? given.rank % 2 : given.rank / 2;
    env.master_addr = NetHosts::kFirstAddress;
    env.master_port = port;
    ProcessGroupsOptions options;
    options.backend = job.backend;
    options.shard_group_size = job.shard_group_size;
    options.timeout = job.timeout;
    absl::StatusOr<ProcessGroups> groups = init_process_groups(env, options);
    ASSERT_TRUE(groups.ok()) << groups.status();
    body(*groups);
  });
}

void train_like_one_process(ProcessGroups& groups, ShardingStrategy strategy) {
  ShardOptions options = layer_units();
  options.strategy = strategy;
  testing::expect_trains_like_one_process(groups, options);
}

TEST_F(TwoHostsTest, SharedMemoryInsideGlooAcross) {
  testing::expect_success(
      collect({Placement::kBlocks, "", 2}, [](ProcessGroups& groups) {
        EXPECT_EQ(groups.backend(), "shm+gloo");
        EXPECT_NE(ProcessGroups::shm(groups.shard_group()), nullptr);
        EXPECT_EQ(ProcessGroups::shm(groups.replicate_group()), nullptr);
        EXPECT_EQ(ProcessGroups::shm(groups.world()), nullptr);
        train_like_one_process(groups, ShardingStrategy::kHybridShard);
      }));
}

TEST_F(TwoHostsTest, OneShardGroupOverBothHosts) {
  testing::expect_success(collect({}, [](ProcessGroups& groups) {
    EXPECT_EQ(ProcessGroups::shm(groups.shard_group()), nullptr);
    train_like_one_process(groups, ShardingStrategy::kFullShard);
  }));
}

// Ranks dealt out one host after the other: the replicas share memory then.
TEST_F(TwoHostsTest, CyclicPlacement) {
  testing::expect_success(
      collect({Placement::kCyclic, "", 2}, [](ProcessGroups& groups) {
        EXPECT_EQ(ProcessGroups::shm(groups.shard_group()), nullptr);
        EXPECT_NE(ProcessGroups::shm(groups.replicate_group()), nullptr);
        train_like_one_process(groups, ShardingStrategy::kHybridShard);
      }));
}

TEST_F(TwoHostsTest, GlooEverywhere) {
  testing::expect_success(
      collect({Placement::kBlocks, "gloo", 2}, [](ProcessGroups& groups) {
        EXPECT_EQ(ProcessGroups::shm(groups.shard_group()), nullptr);
        train_like_one_process(groups, ShardingStrategy::kHybridShard);
      }));
}

void expect_line(const RankOutcome& outcome, const std::string& text) {
  EXPECT_FALSE(outcome.timed_out) << outcome.output;
  EXPECT_EQ(outcome.signal, 0) << outcome.output;
  EXPECT_NE(outcome.exit_code, 0) << outcome.output;
  EXPECT_NE(outcome.output.find(text), std::string::npos) << outcome.output;
}

// Trains until something fails; `step` may make it fail.
void train_until_failure(
    ProcessGroups& groups,
    const std::function<void(ProcessGroups& groups, int step)>& before_step) {
  ShardOptions options = layer_units();
  options.strategy = ShardingStrategy::kHybridShard;
  auto sharded = shard_mlp(groups, options);
  for (int step = 0; step < 1000; ++step) {
    before_step(groups, step);
    sharded.zero_grad();
    sharded(batch(groups.rank())).sum().backward();
    sgd(sharded);
  }
}

TEST_F(TwoHostsTest, AHostWhoseRanksDieIsNamed) {
  const auto outcomes =
      collect({Placement::kBlocks, "", 2, std::chrono::milliseconds(3000)},
              [](ProcessGroups& groups) {
                train_until_failure(groups, [](ProcessGroups& g, int step) {
                  if (step == 3 && g.rank() >= 2) raise(SIGKILL);
                });
              });
  expect_line(outcomes[0], "no answer from ranks 2-3 on host host-b");
  expect_line(outcomes[1], "no answer from ranks 2-3 on host host-b");
}

TEST_F(TwoHostsTest, AHostBehindACutCableIsNamed) {
  const auto outcomes =
      collect({Placement::kBlocks, "", 2, std::chrono::milliseconds(3000)},
              [](ProcessGroups& groups) {
                train_until_failure(groups, [](ProcessGroups& g, int step) {
                  if (step == 3 && g.rank() == 0) NetHosts::cut();
                });
              });
  expect_line(outcomes[0], "no answer from ranks 2-3 on host host-b");
  expect_line(outcomes[1], "no answer from ranks 2-3 on host host-b");
  expect_line(outcomes[2], "no answer from rank 0 on host 10.77.0.1");
  expect_line(outcomes[3], "no answer from rank 0 on host 10.77.0.1");
}

}  // namespace
}  // namespace fullshard
