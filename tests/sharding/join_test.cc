// Ranks that run out of batches before the others.

#include <thread>

#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::batch;
using testing::collect_ranks;
using testing::expect_equal;
using testing::layer_units;
using testing::Mlp;
using testing::RankOutcome;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::sgd;
using testing::shard_mlp;
using testing::state_of;

// Rank r has `first` + r batches; one process sees those of all ranks, divided
// by the number of ranks, as long as anybody has one.
void expect_trains_like_one_process(ProcessGroups& groups,
                                    const ShardOptions& options, int first) {
  auto sharded = shard_mlp(groups, options);
  const int num_batches = first + groups.rank();
  int num_updates = 0;
  const auto update = [&] {
    sgd(sharded);
    sharded.zero_grad();
    ++num_updates;
  };
  auto join = sharded.join();
  for (int i = 0; i < num_batches; ++i) {
    sharded(batch(groups.rank(), i)).sum().backward();
    update();
  }
  join.finish(update);

  Mlp plain;
  const int ranks = groups.world_size(), most = first + ranks - 1;
  for (int i = 0; i < most; ++i) {
    plain.zero_grad();
    for (int rank = 0; rank < ranks; ++rank) {
      if (i >= first + rank) continue;
      (plain.forward(batch(rank, i)).sum() / ranks).backward();
    }
    sgd(plain);
  }
  EXPECT_EQ(num_updates, most);
  expect_equal(state_of(sharded), state_of(plain));
}

RunRanksOptions with(const char* backend, int shard_group_size = 0) {
  RunRanksOptions options;
  options.backend = backend;
  options.shard_group_size = shard_group_size;
  return options;
}

TEST(JoinTest, ThreeAndFourBatches) {
  for (const char* backend : {"shm", "gloo"}) {
    for (int ranks : {1, 2, 3}) {
      run_ranks(
          ranks,
          [](ProcessGroups& groups) {
            expect_trains_like_one_process(groups, layer_units(), 3);
          },
          with(backend));
    }
  }
}

TEST(JoinTest, HalfPrecisionAndHybrid) {
  run_ranks(
      4,
      [](ProcessGroups& groups) {
        ShardOptions options = layer_units();
        options.strategy = ShardingStrategy::kHybridShard;
        expect_trains_like_one_process(groups, options, 1);
      },
      with("shm", 2));
  run_ranks(2, [](ProcessGroups& groups) {
    ShardOptions options = layer_units();
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.buffer_dtype = at::kBFloat16;
    auto sharded = shard_mlp(groups, options);
    auto join = sharded.join();
    for (int i = 0; i < 2 + groups.rank(); ++i) {
      sharded(batch(groups.rank(), i)).sum().backward();
    }
    join.finish([] {});
    sgd(sharded);
  });
}

// A rank that never has a batch, where gathers need no partner.
TEST(JoinTest, NoBatchAtAll) {
  run_ranks(2, [](ProcessGroups& groups) {
    expect_trains_like_one_process(groups, layer_units(), 0);
  });
}

TEST(JoinTest, AccumulationUpdatesOnlyWhenReduced) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_mlp(groups);
    int num_updates = 0;
    const auto update = [&] {
      sgd(sharded);
      sharded.zero_grad();
      ++num_updates;
    };
    auto join = sharded.join();
    for (int step = 0; step < 1 + groups.rank(); ++step) {
      {
        auto no_sync = sharded.no_sync();
        sharded(batch(0, 2 * step)).sum().backward();
      }
      sharded(batch(0, 2 * step + 1)).sum().backward();
      update();
    }
    join.finish(update);
    EXPECT_EQ(num_updates, 2);
  });
}

void expect_text(const RankOutcome& outcome, const std::string& text) {
  EXPECT_FALSE(outcome.timed_out);
  EXPECT_NE(outcome.output.find(text), std::string::npos) << outcome.output;
}

// Where gathers communicate, their order comes from a rank's own steps.
TEST(JoinTest, OneBatchOverGlooIsAnError) {
  RunRanksOptions options = with("gloo");
  options.collective_timeout = std::chrono::milliseconds(2000);
  const auto outcomes = collect_ranks(
      2,
      [](ProcessGroups& groups) {
        auto sharded = shard_mlp(groups);
        auto join = sharded.join();
        for (int i = 0; i < 1 + groups.rank(); ++i) {
          sharded(batch(0)).sum().backward();
        }
        join.finish([] {});
      },
      options);
  expect_text(outcomes[0], "join: rank 0 has run fewer than two steps");
}

// Without join, the rank that goes on names the one it waits for.
TEST(JoinTest, WithoutJoinTheOtherRanksSayWhoIsMissing) {
  RunRanksOptions options = with("shm");
  options.collective_timeout = std::chrono::milliseconds(1000);
  const auto outcomes = collect_ranks(
      2,
      [](ProcessGroups& groups) {
        auto sharded = shard_mlp(groups);
        for (int i = 0; i < 3 + groups.rank(); ++i) {
          sharded(batch(0)).sum().backward();
          sgd(sharded);
          sharded.zero_grad();
        }
        if (groups.rank() == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(3000));
        }
      },
      options);
  expect_text(outcomes[1], "rank 0");
  EXPECT_NE(outcomes[1].exit_code, 0);
}

}  // namespace
}  // namespace fullshard
