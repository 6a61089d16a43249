// Ranks whose data takes them through different parts of the model: nobody
// hangs, and a unit's gradient is the mean with zeros of the ranks that did not
// use it.

#include <map>

#include "ATen/ATen.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {
namespace {

// `mask` says which of four layers run.
struct Paths : torch::nn::Module {
  Paths() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(
          register_module("l" + std::to_string(i), torch::nn::Linear(4, 4)));
    }
  }
  at::Tensor forward(at::Tensor x, const std::vector<bool>& mask) {
    for (size_t i = 0; i < layers.size(); ++i) {
      if (mask[i]) x = layers[i](x).sin();
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

using Mask = std::vector<bool>;

// Steps with these masks per rank give the gradients of one process that
// averages over the ranks; with `warm`, after a first step with every layer.
//
// Where gathers communicate the first two steps must be warm: they find the
// order that all ranks then keep.
void expect_mean(const std::string& backend, const std::vector<Mask>& masks,
                 bool warm = true, bool slots = false) {
  testing::RunRanksOptions run;
  run.backend = backend;
  run.collective_timeout = std::chrono::milliseconds(10000);
  const int num_ranks = static_cast<int>(masks.size());
  testing::run_ranks(
      num_ranks,
      [&](ProcessGroups& groups) {
        at::manual_seed(1);
        auto plain = std::make_shared<Paths>();
        at::manual_seed(1);
        ShardOptions options;
        options.wrap_policy = module_type<torch::nn::LinearImpl>();
        options.offload = slots;  // Masters that are not shared need slots.
        auto sharded =
            fully_shard(std::make_shared<Paths>(), groups, options).value();
        const at::Tensor x = at::ones({3, 4});
        auto step = [&](const std::vector<Mask>& paths) {
          plain->zero_grad();
          sharded.zero_grad();
          for (const Mask& mask : paths) {
            at::Tensor xr = x.clone().set_requires_grad(true);
            (plain->forward(xr, mask).sum() / num_ranks).backward();
          }
          at::Tensor xr = x.clone().set_requires_grad(true);
          sharded(xr, paths[static_cast<size_t>(groups.rank())])
              .sum()
              .backward();
        };
        for (int i = 0; warm && i < 2; ++i) {
          step(std::vector<Mask>(masks.size(), Mask(4, true)));
        }
        for (int i = 0; i < 3; ++i) step(masks);
        std::map<std::string, at::Tensor> expected;
        double squares = 0;
        for (auto& item : plain->named_parameters()) {
          const at::Tensor g = item.value().grad();
          expected[item.key()] = g.defined() ? g : at::zeros_like(item.value());
          squares += expected[item.key()].pow(2).sum().item<double>();
        }
        EXPECT_NEAR(sharded.clip_grad_norm(1e9), std::sqrt(squares), 1e-5);
        for (const LocalParameter& local : sharded.named_local_parameters()) {
          if (!local.tensor.grad().defined()) {
            EXPECT_EQ(expected[local.name].abs().max().item<float>(), 0);
          }
        }
        for (const UnitInfo& unit : sharded.units())
          EXPECT_FALSE(unit.unsharded);
      },
      run);
}

// On shared masters, in shared slots and over Gloo.
void expect_mean_everywhere(const std::vector<Mask>& masks) {
  expect_mean("shm", masks);
  expect_mean("shm", masks, /*warm=*/true, /*slots=*/true);
  expect_mean("gloo", masks);
}

TEST(DifferentPathsTest, OneRankSkipsAUnitInTheMiddle) {
  expect_mean_everywhere({{true, true, true, true}, {true, false, true, true}});
}

TEST(DifferentPathsTest, OneRankSkipsTheLastUnits) {
  expect_mean_everywhere(
      {{true, true, true, true}, {true, false, false, false}});
  expect_mean_everywhere({{true, false, false, false},
                          {true, true, true, true},
                          {true, true, false, false}});
}

TEST(DifferentPathsTest, OneRankSkipsTheFirstUnits) {
  expect_mean_everywhere(
      {{true, true, true, true}, {false, false, true, true}});
}

TEST(DifferentPathsTest, EachRankUsesUnitsOfItsOwn) {
  expect_mean_everywhere({{true, false, true, false},
                          {false, true, false, true},
                          {true, true, false, false}});
}

TEST(DifferentPathsTest, UnitThatNobodyUsesHasNoGradient) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    ShardOptions options;
    options.wrap_policy = module_type<torch::nn::LinearImpl>();
    auto sharded =
        fully_shard(std::make_shared<Paths>(), groups, options).value();
    for (int step = 0; step < 2; ++step) {
      sharded.zero_grad();
      sharded(at::ones({3, 4}), Mask{true, true, true, false}).sum().backward();
      for (const LocalParameter& local : sharded.named_local_parameters()) {
        EXPECT_EQ(local.tensor.grad().defined(), local.name[1] != '3')
            << local.name;
      }
    }
  });
}

TEST(DifferentPathsTest, FromTheFirstStepOn) {
  expect_mean("shm",
              {{true, false, true, false},
               {false, true, false, true},
               {true, true, false, false}},
              /*warm=*/false);
  expect_mean("shm", {{false, false, false, true}, {true, true, true, false}},
              /*warm=*/false);
}

// Where gathers communicate there is no order to follow in the first step: an
// error on every rank, with both units, and no hang.
TEST(DifferentPathsTest, DifferentOrdersInTheFirstStepAreANamedError) {
  testing::RunRanksOptions run;
  run.collective_timeout = std::chrono::milliseconds(3000);
  const auto outcomes = testing::collect_ranks(
      2,
      [](ProcessGroups& groups) {
        ShardOptions options;
        options.wrap_policy = module_type<torch::nn::LinearImpl>();
        options.mixed_precision.param_dtype = at::kBFloat16;
        auto sharded =
            fully_shard(std::make_shared<Paths>(), groups, options).value();
        const Mask mask = groups.rank() == 0 ? Mask{true, false, false, true}
                                             : Mask{false, false, false, true};
        sharded(at::ones({3, 4}), mask).sum().backward();
      },
      run);
  for (const auto& outcome : outcomes) {
    EXPECT_NE(outcome.exit_code, 0);
    EXPECT_THAT(outcome.output, ::testing::HasSubstr("l3"));
  }
}

}  // namespace
}  // namespace fullshard
