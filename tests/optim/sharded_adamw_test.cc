#include "fullshard/optim/sharded_adamw.h"

#include <limits>
#include <map>

#include "ATen/ATen.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/utils/clip_grad.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"

namespace fullshard {
namespace {

// One parameter whose gradient is what forward is given.
struct Plain : torch::nn::Module {
  explicit Plain(at::Tensor value)
      : weight(register_parameter("weight", std::move(value))) {}
  at::Tensor forward(at::Tensor gradient) { return (weight * gradient).sum(); }
  at::Tensor weight;
};

FullyShardedModule<Plain> shard(ProcessGroups& groups, at::Tensor value,
                                ShardingStrategy strategy) {
  ShardOptions options;
  options.strategy = strategy;
  return fully_shard(std::make_shared<Plain>(std::move(value)), groups, options)
      .value();
}

std::map<std::string, at::Tensor> state_of(const ShardedModule& sharded) {
  std::map<std::string, at::Tensor> state;
  EXPECT_TRUE(sharded
                  .full_state_dict(
                      [&](const std::string& name, const at::Tensor& tensor) {
                        state[name] = tensor.clone();
                        return absl::OkStatus();
                      },
                      /*all_ranks=*/true)
                  .ok());
  return state;
}

at::Tensor weight_of(const ShardedModule& sharded) {
  return state_of(sharded).at("weight");
}

// A gradient that is [3, 4, 12] as a whole, so that its norm is 13.
void expect_clip(ShardingStrategy strategy, int num_ranks,
                 bool with_optimizer) {
  testing::run_ranks(num_ranks, [=](ProcessGroups& groups) {
    auto sharded = shard(groups, at::zeros({3}), strategy);
    std::unique_ptr<ShardedAdamW> optimizer;
    if (with_optimizer) optimizer = std::make_unique<ShardedAdamW>(sharded);
    sharded(at::tensor({3.f, 4.f, 12.f})).backward();
    EXPECT_NEAR(sharded.clip_grad_norm(6.5), 13, 1e-5);
    EXPECT_NEAR(sharded.clip_grad_norm(1e9), 6.5, 1e-5);
    for (const LocalParameter& local : sharded.named_local_parameters()) {
      EXPECT_LE(local.tensor.grad().abs().max().item<double>(),
                12 * 6.5 / (13 + 1e-6) + 1e-5);
    }
    EXPECT_NEAR(sharded.clip_grad_norm(1e9), 6.5, 1e-5);
  });
}

TEST(ClipGradNormTest, FullShard) {
  expect_clip(ShardingStrategy::kFullShard, 1, false);
  expect_clip(ShardingStrategy::kFullShard, 2, false);
  // Rank 1 and further ones own only padding.
  expect_clip(ShardingStrategy::kFullShard, 4, false);
}

TEST(ClipGradNormTest, NoShard) {
  expect_clip(ShardingStrategy::kNoShard, 2, false);
}

TEST(ClipGradNormTest, FoldedIntoTheOptimizer) {
  expect_clip(ShardingStrategy::kFullShard, 2, true);
  expect_clip(ShardingStrategy::kNoShard, 2, true);
}

TEST(ClipGradNormTest, OtherNorms) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard(groups, at::zeros({3}), ShardingStrategy::kFullShard);
    sharded(at::tensor({3.f, 4.f, 12.f})).backward();
    EXPECT_NEAR(sharded.clip_grad_norm(1e9, 1), 19, 1e-4);
    EXPECT_NEAR(sharded.clip_grad_norm(1e9, 0.5),
                std::pow(std::sqrt(3.) + 2 + std::sqrt(12.), 2), 1e-3);
    EXPECT_NEAR(
        sharded.clip_grad_norm(1e9, std::numeric_limits<double>::infinity()),
        12, 1e-5);
  });
}

TEST(ClipGradNormTest, NoGradientsAtAllIsZero) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard(groups, at::zeros({3}), ShardingStrategy::kFullShard);
    EXPECT_EQ(sharded.clip_grad_norm(1), 0);
  });
}

TEST(ClipGradNormTest, NonFiniteOnOneRankIsNonFiniteOnAll) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard(groups, at::zeros({8}), ShardingStrategy::kFullShard);
    at::Tensor gradient = at::ones({8});
    gradient[7] = std::numeric_limits<float>::infinity();  // Rank 1's.
    sharded(gradient).backward();
    EXPECT_TRUE(std::isinf(sharded.clip_grad_norm(1)));
    sharded.zero_grad();
    gradient[7] = std::numeric_limits<float>::quiet_NaN();
    sharded(gradient).backward();
    EXPECT_TRUE(std::isnan(sharded.clip_grad_norm(1)));
    EXPECT_TRUE(std::isnan(
        sharded.clip_grad_norm(1, std::numeric_limits<double>::infinity())));
  });
}

TEST(ShardedAdamWTest, DecayFollowsTheOriginalShape) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    at::manual_seed(1);
    torch::nn::Linear linear(5, 3);
    const at::Tensor weight = linear->weight.detach().clone();
    const at::Tensor bias = linear->bias.detach().clone();
    auto sharded = fully_shard(linear, groups).value();
    AdamWOptions options;
    options.lr = 0.1;
    options.weight_decay = 0.5;
    ShardedAdamW optimizer(sharded, options);
    (sharded(at::zeros({2, 5})) * 0).sum().backward();  // Zero gradients.
    optimizer.step();
    auto state = state_of(sharded);
    EXPECT_TRUE(at::allclose(state["weight"], weight * (1 - 0.1 * 0.5)));
    EXPECT_TRUE(state["bias"].equal(bias));
  });
}

struct Mlp : torch::nn::Module {
  Mlp() {
    at::manual_seed(3);
    up = register_module("up", torch::nn::Linear(5, 7));
    down = register_module("down", torch::nn::Linear(7, 3));
    scale = register_parameter("scale", at::ones({3}));
  }
  at::Tensor forward(at::Tensor x) {
    return (down(at::tanh(up(x))) * scale).pow(2).mean();
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor scale;
};

// Clipped in some steps and not in others, at a rate that changes.
TEST(ShardedAdamWTest, EqualsTorchAdamWFor20Steps) {
  for (int num_ranks : {1, 2, 3}) {
    testing::run_ranks(num_ranks, [](ProcessGroups& groups) {
      Mlp plain;
      std::vector<at::Tensor> decayed, others;
      for (auto& p : plain.parameters()) {
        (p.dim() > 1 ? decayed : others).push_back(p);
      }
      using Torch = torch::optim::AdamWOptions;
      std::vector<torch::optim::OptimizerParamGroup> by_decay;
      by_decay.emplace_back(decayed,
                            std::make_unique<Torch>(Torch().weight_decay(0.3)));
      by_decay.emplace_back(others,
                            std::make_unique<Torch>(Torch().weight_decay(0)));
      torch::optim::AdamW expected(by_decay);
      ShardOptions shard_options;
      shard_options.wrap_policy = module_type<torch::nn::LinearImpl>();
      auto sharded =
          fully_shard(std::make_shared<Mlp>(), groups, shard_options).value();
      AdamWOptions options;
      options.weight_decay = 0.3;
      ShardedAdamW optimizer(sharded, options);
      for (int step = 0; step < 20; ++step) {
        const double lr = 0.01 / (1 + step);
        for (auto& group : expected.param_groups()) group.options().set_lr(lr);
        optimizer.set_lr(lr);
        const at::Tensor x = at::arange(10, at::kFloat).view({2, 5}) - step;
        expected.zero_grad();
        optimizer.zero_grad();
        plain.forward(x).backward();
        sharded(x).backward();
        const double max_norm = step % 3 == 0 ? 1e9 : 0.1;
        EXPECT_NEAR(
            sharded.clip_grad_norm(max_norm),
            torch::nn::utils::clip_grad_norm_(plain.parameters(), max_norm),
            1e-4);
        expected.step();
        optimizer.step();
      }
      for (auto& [name, value] : state_of(sharded)) {
        EXPECT_TRUE(
            at::allclose(value, plain.named_parameters()[name], 1e-5, 1e-6))
            << name;
      }
    });
  }
}

TEST(ShardedAdamWTest, ParametersWithoutGradientStay) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard(groups, at::ones({3}), ShardingStrategy::kFullShard);
    ShardedAdamW optimizer(sharded);
    optimizer.step();
    EXPECT_TRUE(weight_of(sharded).equal(at::ones({3})));
    sharded(at::ones({3})).backward();
    optimizer.zero_grad();
    optimizer.step();
    EXPECT_TRUE(weight_of(sharded).equal(at::ones({3})));
  });
}

TEST(TorchOptimTest, SgdWithMomentumOverLocalParameters) {
  testing::run_ranks(3, [](ProcessGroups& groups) {
    at::Tensor expected = at::arange(10, at::kFloat).set_requires_grad(true);
    auto sharded =
        shard(groups, at::arange(10, at::kFloat), ShardingStrategy::kFullShard);
    std::vector<at::Tensor> locals;
    for (const LocalParameter& local : sharded.named_local_parameters()) {
      locals.push_back(local.tensor);
    }
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    torch::optim::SGD plain({expected}, options);
    std::unique_ptr<torch::optim::SGD> sgd;  // A rank may own nothing.
    if (!locals.empty())
      sgd = std::make_unique<torch::optim::SGD>(locals, options);
    for (int step = 0; step < 4; ++step) {
      const at::Tensor gradient = at::arange(10, at::kFloat) - step;
      plain.zero_grad();
      (expected * gradient).sum().backward();
      plain.step();
      if (sgd) sgd->zero_grad();
      sharded(gradient).backward();
      if (sgd) sgd->step();
      EXPECT_TRUE(at::allclose(weight_of(sharded), expected.detach()));
    }
  });
}

}  // namespace
}  // namespace fullshard
