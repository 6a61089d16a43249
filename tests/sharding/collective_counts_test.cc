// How often each collective is called in a step, counted by a backend that
// wraps another.

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "ATen/ATen.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/testing/counting_backend.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "fullshard/tests/testing/tiny_models.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::CountingBackend;
using ::testing::ElementsAre;
using testing::TinyBlockImpl;
using testing::TinyTransformerImpl;

constexpr int64_t kBlocks = 3;

// Also remembers the order: U(unit) for a gather, P(unit) for a reduction.
struct OrderBackend : CountingBackend {
  using CountingBackend::CountingBackend;

  void note(const char* what) {
    const std::string scope = CollectiveScope::describe();
    const size_t at = scope.rfind(' ');
    order.push_back(what + ("(" + scope.substr(at + 1)) + ")");
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    note("U");
    return CountingBackend::_allgather_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    note("P");
    return CountingBackend::_reduce_scatter_base(output, input, options);
  }

  std::vector<std::string> order;
};

// Two ranks whose collectives are counted.
struct Counted {
  explicit Counted(const ProcessGroups& real)
      : backend(c10::make_intrusive<OrderBackend>(real.world())),
        groups(real.env(), "shm", real.device(), backend, backend,
               real.replicate_group()) {}

  int64_t take(const char* operation) {
    const int64_t total =
        static_cast<int64_t>(backend->count(operation).num_calls);
    int64_t& before = seen[operation];
    return total - std::exchange(before, total);
  }

  c10::intrusive_ptr<OrderBackend> backend;
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
    const auto count = apply_activation_checkpointing(
        *model, [](const std::string&, torch::nn::Module& m) {
          return dynamic_cast<TinyBlockImpl*>(&m) != nullptr;
        });
    EXPECT_EQ(count.value(), kBlocks);
  }
  ShardOptions shard;
  shard.strategy = options.strategy;
  shard.wrap_policy = module_type<TinyBlockImpl>();
  return fully_shard(model, counted.groups, shard).value();
}

at::Tensor tokens() { return at::arange(10, at::kLong).view({2, 5}); }

// Counts the second step: the first one records the order.
void expect_step(const Options& options, int64_t forward, int64_t backward,
                 int64_t reductions, int64_t all_reduces = 0) {
  testing::run_ranks(2, [=](ProcessGroups& real) {
    Counted counted(real);
    auto sharded = make(counted, options);
    for (int step = 0; step < 3; ++step) {
      counted.take("all_gather"), counted.take("reduce_scatter");
      counted.take("all_reduce");
      at::Tensor loss = sharded(tokens()).sum();
      const int64_t gathers = counted.take("all_gather");
      loss.backward();
      if (step == 0) continue;
      EXPECT_EQ(gathers, forward);
      EXPECT_EQ(counted.take("all_gather"), backward);
      EXPECT_EQ(counted.take("reduce_scatter"), reductions);
      EXPECT_EQ(counted.take("all_reduce"), all_reduces);
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

TEST(CollectiveCountsTest, NoShard) {
  Options options;
  options.strategy = ShardingStrategy::kNoShard;
  expect_step(options, 0, 0, 0, kBlocks + 1);
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

// One gather ahead of the computation, one reduction behind it.
void expect_order(const Options& options) {
  testing::run_ranks(2, [=](ProcessGroups& real) {
    Counted counted(real);
    auto sharded = make(counted, options);
    for (int step = 0; step < 3; ++step) {
      sharded.zero_grad();
      counted.backend->order.clear();
      at::Tensor loss = sharded(tokens()).sum();
      if (step > 0) {
        EXPECT_THAT(
            counted.backend->order,
            ElementsAre("U(root)", "U(block0)", "U(block1)", "U(block2)"));
      }
      counted.backend->order.clear();
      loss.backward();
      if (step > 0) {
        EXPECT_THAT(counted.backend->order,
                    ElementsAre("U(block1)", "P(block2)", "U(block0)",
                                "P(block1)", "P(block0)", "P(root)"));
      }
    }
  });
}

TEST(CollectiveCountsTest, Order) { expect_order({}); }

TEST(CollectiveCountsTest, CheckpointingKeepsTheOrder) {
  Options options;
  options.checkpointing = true;
  expect_order(options);
}

// What happens before the first good step must not cost later ones.
void expect_full_shard_counts_after(
    const std::function<void(FullyShardedModule<TinyTransformerImpl>&)>&
        before) {
  testing::run_ranks(2, [&](ProcessGroups& real) {
    Counted counted(real);
    auto sharded = make(counted, {});
    before(sharded);
    for (int step = 0; step < 4; ++step) {
      sharded.zero_grad();
      counted.take("all_gather"), counted.take("reduce_scatter");
      counted.backend->order.clear();
      sharded(tokens()).sum().backward();
      if (step < 2) continue;
      EXPECT_EQ(counted.take("all_gather"), 2 * kBlocks);
      EXPECT_EQ(counted.take("reduce_scatter"), kBlocks + 1);
      EXPECT_THAT(counted.backend->order,
                  ElementsAre("U(root)", "U(block0)", "U(block1)", "U(block2)",
                              "U(block1)", "P(block2)", "U(block0)",
                              "P(block1)", "P(block0)", "P(root)"));
    }
  });
}

TEST(CollectiveCountsTest, AfterForwardsThatNobodyDifferentiated) {
  expect_full_shard_counts_after([](auto& sharded) {
    sharded(tokens());
    sharded(tokens());
  });
}

TEST(CollectiveCountsTest, AfterAFirstForwardThatFailed) {
  expect_full_shard_counts_after([](auto& sharded) {
    auto forward = [&](at::Tensor ids) -> at::Tensor {
      sharded.module()->forward(ids);
      throw std::runtime_error("bomb");
    };
    EXPECT_ANY_THROW(sharded.call(forward, tokens()));
  });
}

TEST(CollectiveCountsTest, AfterAFirstBackwardThatFailed) {
  expect_full_shard_counts_after([](auto& sharded) {
    // The embedding's gradient comes last.
    at::Tensor weight = sharded.module()->named_parameters()["embed.weight"];
    const unsigned hook = weight.register_hook(
        [](at::Tensor) { throw std::runtime_error("bomb"); });
    EXPECT_ANY_THROW(sharded(tokens()).sum().backward());
    weight.remove_hook(hook);
  });
}

TEST(CollectiveCountsTest, SecondBackwardOnARetainedGraph) {
  testing::run_ranks(2, [](ProcessGroups& real) {
    Counted counted(real);
    auto sharded = make(counted, {});
    sharded(tokens()).sum().backward();
    at::Tensor loss = sharded(tokens()).sum();
    loss.backward({}, /*retain_graph=*/true);
    counted.take("all_gather"), counted.take("reduce_scatter");
    counted.backend->order.clear();
    loss.backward();
    // Nothing stayed unsharded: every unit is gathered once.
    EXPECT_EQ(counted.take("all_gather"), kBlocks + 1);
    EXPECT_EQ(counted.take("reduce_scatter"), kBlocks + 1);
    // Reductions start on the way, not at the end.
    const auto& order = counted.backend->order;
    EXPECT_LT(std::find(order.begin(), order.end(), "P(block2)"),
              std::find(order.begin(), order.end(), "U(block0)"));
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
