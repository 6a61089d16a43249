#include "fullshard/sharding/plan.h"

#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"

namespace fullshard {
namespace {

using testing::batch;
using ::testing::HasSubstr;
using testing::layer_units;
using testing::shard_mlp;

PlanOptions shards(int num_shards) {
  PlanOptions options;
  options.num_shards = num_shards;
  return options;
}

PlanUnit unit_of(const std::vector<int64_t>& numels) {
  PlanUnit unit;
  unit.name = "u";
  for (int64_t numel : numels) unit.parameters.push_back({"p", numel});
  return unit;
}

TEST(PlanTest, LayoutsOfKnownSizes) {
  const Plan fp32 = make_plan({unit_of({21, 35, 25})}, shards(2));
  EXPECT_EQ(fp32.rows[0].numel, 81);
  EXPECT_EQ(fp32.rows[0].padding_numel, 88 - 81);
  EXPECT_EQ(fp32.rows[0].sharded_bytes, 44 * 4);
  EXPECT_EQ(fp32.rows[0].unsharded_bytes, 88 * 4);
  PlanOptions half = shards(2);
  half.param_dtype = at::kBFloat16;
  const Plan bf16 = make_plan({unit_of({21, 35, 25})}, half);
  EXPECT_EQ(bf16.rows[0].padding_numel, 96 - 81);
  EXPECT_EQ(bf16.rows[0].sharded_bytes, 48 * 4);  // Masters stay in fp32.
  EXPECT_EQ(bf16.rows[0].unsharded_bytes, 96 * 2);
  EXPECT_EQ(bf16.rows[0].reduce_bytes, 96 * 2);
}

std::vector<PlanUnit> blocks_and_root(int num_blocks) {
  std::vector<PlanUnit> units = {unit_of({100})};
  units[0].name = "root";
  units[0].encloses_others = true;
  for (int i = 0; i < num_blocks; ++i) {
    units.push_back(unit_of({1000}));
    units.back().name = "block" + std::to_string(i);
  }
  return units;
}

// The table of SHARDING, B = 3.
TEST(PlanTest, CollectivesOfAStep) {
  PlanOptions options = shards(4);
  Plan::Row total = make_plan(blocks_and_root(3), options).total;
  EXPECT_EQ(total.gathers_forward, 4);
  EXPECT_EQ(total.gathers_backward, 2);
  EXPECT_EQ(total.reduce_scatters, 4);
  EXPECT_EQ(total.all_reduces, 0);
  options.strategy = ShardingStrategy::kShardGradOp;
  total = make_plan(blocks_and_root(3), options).total;
  EXPECT_EQ(total.gathers_forward, 4);
  EXPECT_EQ(total.gathers_backward, 0);
  options.strategy = ShardingStrategy::kHybridShard;
  options.num_replicas = 2;
  total = make_plan(blocks_and_root(3), options).total;
  EXPECT_EQ(total.gathers_backward, 2);
  EXPECT_EQ(total.all_reduces, 4);
  options.strategy = ShardingStrategy::kNoShard;
  total = make_plan(blocks_and_root(3), options).total;
  EXPECT_EQ(total.gathers_forward + total.reduce_scatters, 0);
  EXPECT_EQ(total.all_reduces, 4);
}

TEST(PlanTest, BoundsOfMemory) {
  const Plan plan = make_plan(blocks_and_root(8), shards(2));
  const int64_t U = 4000, X = 416, S = 8 * 2000 + 208;
  EXPECT_EQ(plan.total.sharded_bytes, S);
  EXPECT_EQ(plan.init_bytes, S + U);
  EXPECT_EQ(plan.forward_bytes, S + 2 * U + X);
  EXPECT_EQ(plan.backward_bytes, 2 * S + 2 * U + 2 * U + X);
  EXPECT_EQ(plan.step_bytes, 4 * S);
}

// What is sharded is what was planned, in worlds that exist and one that does
// not.
TEST(PlanTest, EqualsTheShardedModel) {
  for (int ranks : {1, 2, 3, 4, 64}) {
    testing::expect_success(
        testing::collect_processes(1, [&](const LaunchEnv&) {
          LaunchEnv env;
          env.world_size = env.local_world_size = ranks;
          ProcessGroupsOptions fake;
          fake.backend = "fake";
          ProcessGroups groups = init_process_groups(env, fake).value();
          for (bool half : {false, true}) {
            ShardOptions options = layer_units();
            if (half) {
              options.mixed_precision.param_dtype = at::kBFloat16;
              options.mixed_precision.reduce_dtype = at::kFloat;
              options.mixed_precision.buffer_dtype = at::kBFloat16;
            }
            auto sharded = shard_mlp(groups, options);
            const Plan plan = sharded.plan();
            const std::vector<UnitInfo> units = sharded.units();
            ASSERT_EQ(plan.rows.size(), units.size());
            for (size_t i = 0; i < units.size(); ++i) {
              const Plan::Row& row = plan.rows[i];
              EXPECT_EQ(row.unit, units[i].name);
              EXPECT_EQ(row.numel, units[i].numel);
              EXPECT_EQ(row.padding_numel, units[i].padding_numel);
              EXPECT_EQ(row.unsharded_bytes, units[i].unsharded_bytes);
              EXPECT_EQ(row.sharded_bytes, units[i].sharded_bytes);
            }
            int64_t most = 0;
            for (int step = 0; step < 2; ++step) {
              sharded(batch(0)).sum().backward();
              most = std::max(most, sharded.memory_use().total());
            }
            EXPECT_LE(most, plan.backward_bytes + 64 * 16);
          }
        }));
  }
}

// The shapes of a 70B decoder: 80 layers of width 8,192.
std::vector<PlanUnit> decoder_70b() {
  const int64_t d = 8192, kv = 1024, ffn = 28672, vocab = 32000;
  std::vector<PlanUnit> units(1);
  units[0].name = "root";
  units[0].encloses_others = true;
  units[0].parameters = {{"embed", vocab * d, at::kBFloat16},
                         {"norm", d, at::kBFloat16},
                         {"head", vocab * d, at::kBFloat16}};
  for (int i = 0; i < 80; ++i) {
    PlanUnit layer;
    layer.name = "model.layers." + std::to_string(i);
    for (int64_t numel :
         {d * d, kv * d, kv * d, d * d, ffn * d, ffn * d, ffn * d, d, d}) {
      layer.parameters.push_back({"p", numel, at::kBFloat16});
    }
    units.push_back(std::move(layer));
  }
  return units;
}

TEST(PlanTest, SeventyBillionOver16384Ranks) {
  PlanOptions options = shards(16384);
  options.reduce_dtype = at::kFloat;
  const Plan plan = make_plan(decoder_70b(), options);
  EXPECT_EQ(plan.total.numel, 68976648192);
  EXPECT_EQ(plan.rows[1].numel, 855654400);
  // 855,654,400 / 16,384 = 52,225: rounded up to 8 elements of 16 bits.
  EXPECT_EQ(plan.rows[1].sharded_bytes, 52232 * 2);
  EXPECT_EQ(plan.rows[1].padding_numel, 52232 * int64_t{16384} - 855654400);
  EXPECT_EQ(plan.total.gathers_forward, 81);
  EXPECT_EQ(plan.total.gathers_backward, 79);
  const std::string table = plan.table();
  EXPECT_THAT(table, HasSubstr("16384 ranks: shard groups of 16384"));
  EXPECT_THAT(table, HasSubstr("model.layers.0 ..78 (79 of)"));
  EXPECT_THAT(table, HasSubstr("1.6 GiB"));
}

}  // namespace
}  // namespace fullshard
