// Parameters that are frozen and made trainable after sharding.

#include "fullshard/optim/ema.h"
#include "fullshard/optim/optimizer_state.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"
#include "torch/optim/adamw.h"

namespace fullshard {
namespace {

using testing::batch;
using testing::expect_equal;
using testing::layer_units;
using testing::Mlp;
using testing::plain_backward;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::sgd;
using testing::shard_mlp;
using testing::state_of;

void set_trainable(Mlp& plain, const std::string& prefix, bool value) {
  for (auto& item : plain.named_parameters()) {
    if (item.key().rfind(prefix, 0) == 0) item.value().set_requires_grad(value);
  }
}

void set_trainable(ShardedModule& sharded, const std::string& prefix,
                   bool value) {
  const absl::Status status = sharded.set_trainable(
      [&](const std::string& name) { return name.rfind(prefix, 0) == 0; },
      value);
  ASSERT_TRUE(status.ok()) << status;
}

struct Change {
  const char* prefix;
  bool value;
};

// Frozen, trained, frozen again: whole units, a part of one, the root's own.
void expect_trains_like_one_process(ProcessGroups& groups,
                                    const ShardOptions& options) {
  auto sharded = shard_mlp(groups, options);
  Mlp plain;
  for (const Change& change :
       {Change{"l0", false}, Change{"l1.weight", false}, Change{"scale", false},
        Change{"l0", true}, Change{"l", true}, Change{"l1", false},
        Change{"scale", true}, Change{"l", true}, Change{"l", true}}) {
    set_trainable(sharded, change.prefix, change.value);
    set_trainable(plain, change.prefix, change.value);
    for (int step = 0; step < 2; ++step) {
      sharded.zero_grad(), plain.zero_grad();
      sharded(batch(groups.rank())).sum().backward();
      plain_backward(plain, groups.world_size());
      sgd(sharded), sgd(plain);
    }
    sharded.zero_grad();
    expect_equal(state_of(sharded), state_of(plain));
  }
}

TEST(SetTrainableTest, TrainsLikeOneProcess) {
  for (const char* backend : {"shm", "gloo"}) {
    for (int ranks : {1, 2, 3}) {
      RunRanksOptions options;
      options.backend = backend;
      run_ranks(
          ranks,
          [](ProcessGroups& groups) {
            expect_trains_like_one_process(groups, layer_units());
            ShardOptions options;  // One unit.
            options.strategy = ShardingStrategy::kShardGradOp;
            expect_trains_like_one_process(groups, options);
          },
          options);
    }
  }
}

// A user's tensors of units that were not touched stay the same.
TEST(SetTrainableTest, OtherUnitsKeepTheirLocalParameters) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_mlp(groups);
    std::map<std::string, at::Tensor> before;
    for (const auto& local : sharded.named_local_parameters()) {
      before[local.name] = local.tensor;
    }
    set_trainable(sharded, "l0.bias", false);
    for (const auto& local : sharded.named_local_parameters()) {
      EXPECT_NE(local.name, "l0.bias");
      EXPECT_EQ(local.tensor.is_same(before.at(local.name)),
                local.name.rfind("l0", 0) != 0)
          << local.name;
    }
  });
}

// Moments of parameters that stay trainable survive; a new one starts at 0.
TEST(SetTrainableTest, OptimizerAndEmaFollow) {
  run_ranks(2, [](ProcessGroups& groups) {
    AdamWOptions options;
    options.lr = 0.05;
    auto sharded = shard_mlp(groups);
    Mlp plain;
    set_trainable(sharded, "l0.bias", false);
    set_trainable(plain, "l0.bias", false);
    ShardedAdamW optimizer(sharded, options);
    ShardedEma ema(sharded, 3);
    std::map<std::string, at::Tensor> plain_ema;
    std::map<std::string, std::unique_ptr<torch::optim::AdamW>> plain_adamw;
    const auto train = [&] {
      for (auto& item : plain.named_parameters()) {
        if (!item.value().requires_grad()) continue;
        plain_ema.emplace(item.key(), item.value().detach().clone());
        if (plain_adamw.count(item.key()) != 0) continue;
        torch::optim::AdamWOptions adamw(options.lr);
        adamw.weight_decay(item.value().dim() > 1 ? options.weight_decay : 0);
        plain_adamw[item.key()] = std::make_unique<torch::optim::AdamW>(
            std::vector<at::Tensor>{item.value()}, adamw);
      }
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad(), plain.zero_grad();
        sharded(batch(groups.rank())).sum().backward();
        plain_backward(plain, groups.world_size());
        optimizer.step();
        ema.update();
        at::NoGradGuard no_grad;
        for (auto& [name, adamw] : plain_adamw) adamw->step();
        for (auto& item : plain.named_parameters()) {
          if (!item.value().requires_grad()) continue;
          plain_ema.at(item.key()).lerp_(item.value(), 1 - ema.decay());
        }
      }
      optimizer.zero_grad();
      expect_equal(state_of(sharded), state_of(plain));
      testing::State averages;
      ASSERT_TRUE(ema.full_state_dict(
                         [&](const std::string& name, const at::Tensor& t) {
                           averages[name] = t.clone();
                           return absl::OkStatus();
                         },
                         /*all_ranks=*/true)
                      .ok());
      expect_equal(averages,
                   testing::State(plain_ema.begin(), plain_ema.end()));
    };
    train();
    set_trainable(sharded, "l0.bias", true);
    set_trainable(plain, "l0.bias", true);
    train();
    const auto state = full_optimizer_state(optimizer, /*all_ranks=*/true);
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_EQ(state->state.at("l0.bias").at("step").item<double>(), 3);
    EXPECT_EQ(state->state.at("l0.weight").at("step").item<double>(), 6);
    set_trainable(sharded, "l2", false);
    set_trainable(plain, "l2", false);
    plain_adamw.erase("l2.weight"), plain_adamw.erase("l2.bias");
    plain_ema.erase("l2.weight"), plain_ema.erase("l2.bias");
    train();
  });
}

TEST(SetTrainableTest, AGradientWouldBeLost) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_mlp(groups);
    sharded(batch(0)).sum().backward();
    const absl::Status status = sharded.set_trainable(
        [](const std::string& name) { return name == "l1.bias"; }, false);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(std::string(status.message()).find("unit 'l1' has a gradient"),
              std::string::npos)
        << status;
  });
}

struct WithTable : torch::nn::Module {
  WithTable() {
    table = register_parameter("table", at::arange(6), /*requires_grad=*/false);
    weight = register_parameter("weight", at::ones({6}));
  }
  at::Tensor forward(at::Tensor x) { return x * weight + table; }
  at::Tensor table, weight;
};

TEST(SetTrainableTest, IntegersCannotTrain) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<WithTable>(), groups).value();
    const absl::Status status = sharded.set_trainable(
        [](const std::string& name) { return name == "table"; }, true);
    EXPECT_EQ(status.message(),
              "set_trainable: parameter 'table': expected a floating dtype, "
              "got Long");
  });
}

}  // namespace
}  // namespace fullshard
