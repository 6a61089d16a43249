// Checkpoints of every kind over sharded blocks: the same bits as without, on
// every mesh, with and without no_sync, and never a gather more.

#include "ATen/ATen.h"
#include "fullshard/activation_ckpt/checkpointable.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/testing/counting_backend.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "fullshard/tests/testing/tiny_models.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::run_ranks;
using testing::RunRanksOptions;
using testing::TinyBlockImpl;
using testing::TinyTransformerImpl;

bool is_block(const std::string&, torch::nn::Module& module) {
  return dynamic_cast<TinyBlockImpl*>(&module) != nullptr;
}

// Null: no checkpointing.
using Kind = std::pair<const char*, const CheckpointOptions*>;

struct Trained {
  std::vector<at::Tensor> shards;
  int gathers = 0;  // Of the last step.
};

Trained train(ProcessGroups& groups, const CheckpointOptions* checkpointing,
              ShardingStrategy strategy,
              testing::CountingBackend* counted = nullptr) {
  at::manual_seed(5);
  auto model = std::make_shared<TinyTransformerImpl>(3, 8, 13);
  ShardOptions options;
  options.strategy = strategy;
  options.wrap_policy = module_type<TinyBlockImpl>();
  auto sharded = fully_shard(model, groups, options).value();
  if (checkpointing != nullptr) {
    EXPECT_TRUE(
        apply_activation_checkpointing(*model, is_block, *checkpointing).ok());
  }
  EXPECT_TRUE(sharded.set_backward_prefetch("block2", {"block1"}).ok());
  ShardedAdamW optimizer(sharded);
  const auto step = [&](int micro_batch) {
    const at::Tensor tokens =
        at::arange(14).add(groups.rank() + micro_batch).remainder(13);
    sharded(tokens.view({2, 7})).pow(2).sum().backward();
  };
  Trained result;
  for (int i = 0; i < 3; ++i) {
    if (counted != nullptr) counted->reset();
    {
      const auto no_sync = sharded.no_sync();
      step(0);
    }
    step(1);
    if (counted != nullptr) {
      result.gathers = static_cast<int>(counted->count("all_gather").num_calls);
    }
    sharded.clip_grad_norm(1);
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const LocalShard& shard : sharded.local_shards()) {
    result.shards.push_back(shard.values.clone());
  }
  return result;
}

std::vector<Kind> kinds() {
  static const auto* const all = [] {
    auto* const options = new std::vector<CheckpointOptions>(3);
    (*options)[1].keep = matmuls_and_attention();
    (*options)[2].offload_inputs = true;
    return options;
  }();
  return {{"whole", &(*all)[0]},
          {"selective", &(*all)[1]},
          {"offloaded", &(*all)[2]}};
}

void expect_same(const Trained& actual, const Trained& expected,
                 const char* kind) {
  ASSERT_EQ(actual.shards.size(), expected.shards.size());
  for (size_t i = 0; i < actual.shards.size(); ++i) {
    EXPECT_TRUE(actual.shards[i].equal(expected.shards[i])) << kind << i;
  }
  EXPECT_LE(actual.gathers, expected.gathers) << kind;
}

TEST(CheckpointShardedTest, SameBitsOnEveryMesh) {
  struct Mesh {
    int ranks;
    int shard_group_size;
    ShardingStrategy strategy;
    const char* backend;
  };
  for (const Mesh& mesh :
       std::vector<Mesh>{{1, 0, ShardingStrategy::kFullShard, "single"},
                         {2, 0, ShardingStrategy::kFullShard, "shm"},
                         {2, 0, ShardingStrategy::kFullShard, "gloo"},
                         {3, 0, ShardingStrategy::kShardGradOp, "shm"},
                         {4, 2, ShardingStrategy::kHybridShard, "shm"},
                         {2, 0, ShardingStrategy::kNoShard, "shm"}}) {
    RunRanksOptions run;
    run.backend = mesh.backend;
    run.shard_group_size = mesh.shard_group_size;
    run_ranks(
        mesh.ranks,
        [&](ProcessGroups& groups) {
          const Trained plain = train(groups, nullptr, mesh.strategy);
          for (const auto& [kind, options] : kinds()) {
            expect_same(train(groups, options, mesh.strategy), plain, kind);
          }
        },
        run);
  }
}

TEST(CheckpointShardedTest, NeverAGatherMore) {
  run_ranks(2, [](ProcessGroups& real) {
    auto backend = c10::make_intrusive<testing::CountingBackend>(real.world());
    ProcessGroups groups(real.env(), "shm", real.device(), backend, backend,
                         real.replicate_group());
    const auto run = [&](const CheckpointOptions* options) {
      return train(groups, options, ShardingStrategy::kFullShard,
                   backend.get());
    };
    const Trained plain = run(nullptr);
    EXPECT_GT(plain.gathers, 0);
    for (const auto& [kind, options] : kinds()) {
      expect_same(run(options), plain, kind);
    }
  });
}

}  // namespace
}  // namespace fullshard
