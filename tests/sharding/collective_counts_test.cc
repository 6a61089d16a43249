// How often each collective is called in a step, counted by a backend that
// wraps another.

#include <functional>

#include "ATen/ATen.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "gtest/gtest.h"
#include "tests/testing/counting_backend.h"
#include "tests/testing/run_ranks.h"
#include "tests/testing/tiny_models.h"

namespace fullshard {
namespace {

using testing::CountingBackend;
using testing::TinyBlockImpl;
using testing::TinyTransformerImpl;

constexpr int64_t kBlocks = 3;

// Two ranks whose collectives are counted.
struct Counted {
  explicit Counted(const ProcessGroups& real)
      : backend(c10::make_intrusive<CountingBackend>(real.world())),
        groups(real.env(), "shm", real.device(), backend, backend,
               real.replicate_group()) {}

  int64_t take(const char* operation) {
    const int64_t total =
        static_cast<int64_t>(backend->count(operation).num_calls);
    int64_t& before = seen[operation];
    return total - std::exchange(before, total);
  }

  c10::intrusive_ptr<CountingBackend> backend;
  ProcessGroups groups;
  std::map<std::string, int64_t> seen;
};

struct Options {
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  bool checkpointing = false;
  bool freeze_first_block = false;
  bool freeze_embedding = false;
};

FullyShardedModule<TinyTransformerImpl> make(Counted& counted,
                                             const Options& options) {
  at::manual_seed(1);
  auto model = std::make_shared<TinyTransformerImpl>(kBlocks, 6, 13);
  for (auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    if ((options.freeze_first_block && name.rfind("block0", 0) == 0) ||
        (options.freeze_embedding && name.rfind("embed", 0) == 0)) {
      item.value().set_requires_grad(false);
    }
  }
  if (options.checkpointing) {
    (void)apply_activation_checkpointing(
        *model, [](const std::string&, torch::nn::Module& m) {
          return dynamic_cast<TinyBlockImpl*>(&m) != nullptr;
        });
  }
  ShardOptions shard;
  shard.strategy = options.strategy;
  shard.wrap_policy = module_type<TinyBlockImpl>();
  return fully_shard(model, counted.groups, shard).value();
}

at::Tensor tokens() { return at::arange(10, at::kLong).view({2, 5}); }

// Counts the second step: the first one records the order.
void expect_step(const Options& options, int64_t forward, int64_t backward,
                 int64_t reductions) {
  testing::run_ranks(2, [=](ProcessGroups& real) {
    Counted counted(real);
    auto sharded = make(counted, options);
    for (int step = 0; step < 3; ++step) {
      counted.take("all_gather"), counted.take("reduce_scatter");
      at::Tensor loss = sharded(tokens()).sum();
      const int64_t gathers = counted.take("all_gather");
      loss.backward();
      if (step == 0) continue;
      EXPECT_EQ(gathers, forward);
      EXPECT_EQ(counted.take("all_gather"), backward);
      EXPECT_EQ(counted.take("reduce_scatter"), reductions);
      EXPECT_EQ(counted.take("all_reduce"), 0);
    }
  });
}

TEST(CollectiveCountsTest, FullShard) {
  expect_step({}, kBlocks + 1, kBlocks - 1, kBlocks + 1);
}

TEST(CollectiveCountsTest, ShardGradOp) {
  Options options;
  options.strategy = ShardingStrategy::kShardGradOp;
  expect_step(options, kBlocks + 1, 0, kBlocks + 1);
}

TEST(CollectiveCountsTest, CheckpointingCostsNoGather) {
  Options options;
  options.checkpointing = true;
  expect_step(options, kBlocks + 1, kBlocks - 1, kBlocks + 1);
}

TEST(CollectiveCountsTest, FrozenUnitIsGatheredButNotReduced) {
  Options options;
  options.freeze_first_block = true;
  expect_step(options, kBlocks + 1, kBlocks - 1, kBlocks);
}

TEST(CollectiveCountsTest, FrozenUnitWithoutGradientsIsNotGatheredAgain) {
  Options options;
  options.freeze_first_block = options.freeze_embedding = true;
  // The root has a frozen and a trainable part: two pieces of one gather.
  expect_step(options, kBlocks + 2, kBlocks - 2, kBlocks);
}

TEST(CollectiveCountsTest, NoSyncReducesOnceForAllMicroBatches) {
  testing::run_ranks(2, [](ProcessGroups& real) {
    Counted counted(real);
    auto sharded = make(counted, {});
    sharded(tokens()).sum().backward();
    counted.take("all_gather"), counted.take("reduce_scatter");
    for (int micro_batch = 0; micro_batch < 4; ++micro_batch) {
      sharded.set_requires_gradient_sync(micro_batch == 3);
      sharded(tokens()).sum().backward();
      EXPECT_EQ(counted.take("all_gather"), 2 * kBlocks);
      EXPECT_EQ(counted.take("reduce_scatter"),
                micro_batch == 3 ? kBlocks + 1 : 0);
    }
  });
}

TEST(CollectiveCountsTest, ClipIsOneScalarAllReduce) {
  testing::run_ranks(2, [](ProcessGroups& real) {
    Counted counted(real);
    auto sharded = make(counted, {});
    sharded(tokens()).sum().backward();
    counted.take("all_reduce");
    sharded.clip_grad_norm(1);
    EXPECT_EQ(counted.take("all_reduce"), 1);
  });
}

TEST(CollectiveCountsTest, ForwardWithoutGradientsLeavesNothingUnsharded) {
  testing::run_ranks(2, [](ProcessGroups& real) {
    Counted counted(real);
    auto sharded = make(counted, {});
    sharded(tokens()).sum().backward();
    counted.take("all_gather");
    at::NoGradGuard no_grad;
    sharded(tokens());
    EXPECT_EQ(counted.take("all_gather"), kBlocks + 1);
    for (const UnitInfo& unit : sharded.units()) EXPECT_FALSE(unit.unsharded);
  });
}

}  // namespace
}  // namespace fullshard
