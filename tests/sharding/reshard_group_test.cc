// Units that stay split over a few ranks between forward and backward.

#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/counting_backend.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::batch;
using testing::CountingBackend;
using testing::expect_trains_like_one_process;
using testing::layer_units;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::shard_mlp;

TEST(ReshardGroupTest, TrainsLikeOneProcess) {
  for (const char* backend : {"gloo", "shm"}) {
    for (int k : {1, 2, 4}) {
      RunRanksOptions run;
      run.backend = backend;
      run.reshard_group_size = k;
      run_ranks(
          4,
          [](ProcessGroups& groups) {
            ShardOptions options = layer_units();
            expect_trains_like_one_process(groups, options);
            options.mixed_precision.reduce_dtype = at::kDouble;
            expect_trains_like_one_process(groups, options);
          },
          run);
    }
  }
}

// Two shard groups of four ranks, each of two reshard groups.
TEST(ReshardGroupTest, InsideShardGroups) {
  RunRanksOptions run;
  run.backend = "gloo";
  run.shard_group_size = 4;
  run.reshard_group_size = 2;
  run_ranks(
      8,
      [](ProcessGroups& groups) {
        ShardOptions options = layer_units();
        options.strategy = ShardingStrategy::kHybridShard;
        expect_trains_like_one_process(groups, options);
      },
      run);
}

// Backward gathers over the small group, of which there is one for all units.
TEST(ReshardGroupTest, BackwardGathersAmongFewRanks) {
  RunRanksOptions run;
  run.backend = "gloo";
  run.reshard_group_size = 2;
  run_ranks(
      4,
      [](ProcessGroups& real) {
        auto all = c10::make_intrusive<CountingBackend>(real.shard_group());
        auto few = c10::make_intrusive<CountingBackend>(real.reshard_group());
        ProcessGroups groups(real.env(), "gloo", real.device(), all, all,
                             real.replicate_group(), few);
        auto sharded = shard_mlp(groups);
        sharded(batch(groups.rank())).sum().backward();
        all->reset(), few->reset();
        const at::Tensor loss = sharded(batch(groups.rank())).sum();
        EXPECT_EQ(all->count("all_gather").num_calls, 4);
        EXPECT_EQ(few->count("all_gather").num_calls, 0);
        loss.backward();
        EXPECT_EQ(all->count("all_gather").num_calls, 4);
        // Two of three layers: the last one and the root stayed.
        EXPECT_EQ(few->count("all_gather").num_calls, 2);
        EXPECT_EQ(all->count("reduce_scatter").num_calls, 4);
      },
      run);
}

TEST(ReshardGroupTest, MustDivideTheShardGroup) {
  LaunchEnv env;
  env.world_size = env.local_world_size = 4;
  ProcessGroupsOptions options;
  options.backend = "fake";
  options.reshard_group_size = 3;
  EXPECT_EQ(init_process_groups(env, options).status().message(),
            "reshard_group_size: expected a divisor of the 4 ranks of a shard "
            "group, got 3");
}

}  // namespace
}  // namespace fullshard
