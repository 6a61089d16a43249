// Evaluation in full precision, and that no sequence of modes loses a bit.

#include <random>

#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::batch;
using testing::expect_equal;
using testing::layer_units;
using testing::Mlp;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::shard_mlp;
using testing::State;
using testing::state_of;

ShardOptions half(bool full_precision_in_eval) {
  ShardOptions options = layer_units();
  options.mixed_precision.param_dtype = at::kBFloat16;
  options.mixed_precision.buffer_dtype = at::kBFloat16;
  options.mixed_precision.full_precision_in_eval = full_precision_in_eval;
  return options;
}

TEST(EvalPrecisionTest, OutputsAreThoseOfFp32) {
  for (const char* backend : {"shm", "gloo"}) {
    for (int ranks : {1, 2, 3}) {
      RunRanksOptions run;
      run.backend = backend;
      run_ranks(
          ranks,
          [](ProcessGroups& groups) {
            auto sharded = shard_mlp(groups, half(true));
            Mlp plain;
            const at::Tensor x = batch(groups.rank());
            {
              at::NoGradGuard no_grad;
              EXPECT_EQ(sharded(x).scalar_type(), at::kBFloat16);  // In train.
              sharded->eval();
              EXPECT_TRUE(at::allclose(sharded(x), plain.forward(x), 0, 1e-6));
            }
            // With gradients the policy holds in eval mode too.
            EXPECT_EQ(sharded(x).scalar_type(), at::kBFloat16);
            sharded->train();
            sharded(x).sum().backward();
          },
          run);
    }
  }
}

void update_buffer(Mlp& module) {
  at::NoGradGuard no_grad;
  module.running.add_(0.125);
}

// Train, evaluate, save and load in random order, with full precision in eval
// and without: the same parameters and buffers, bit for bit.
TEST(EvalPrecisionTest, EverySequenceKeepsTheMasters) {
  for (unsigned seed : {1u, 2u, 3u}) {
    run_ranks(2, [seed](ProcessGroups& groups) {
      auto with = shard_mlp(groups, half(true));
      auto without = shard_mlp(groups, half(false));
      ShardedAdamW first(with), second(without);
      std::mt19937 random(seed);
      State saved = state_of(with);
      const auto load = [&](ShardedModule& sharded) {
        EXPECT_TRUE(
            sharded
                .load_full_state_dict(
                    [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
                      return saved.at(name);
                    })
                .ok());
      };
      for (int i = 0; i < 25; ++i) {
        switch (random() % 5) {
          case 0:
            for (auto* sharded : {&with, &without}) {
              (*sharded)->train();
              (*sharded)(batch(groups.rank(), i)).sum().backward();
            }
            first.step(), second.step();
            first.zero_grad(), second.zero_grad();
            break;
          case 1:
            for (auto* sharded : {&with, &without}) {
              (*sharded)->eval();
              at::NoGradGuard no_grad;
              (*sharded)(batch(groups.rank(), i));
            }
            break;
          case 2:
            saved = state_of(with);
            break;
          case 3:
            load(with), load(without);
            break;
          default: {
            const State a = state_of(with), b = state_of(without);
            expect_equal(a, b, 0, 0);
            EXPECT_EQ(a.at("running").scalar_type(), at::kFloat);
            EXPECT_EQ(a.at("l0.weight").scalar_type(), at::kFloat);
          }
        }
      }
      expect_equal(state_of(with), state_of(without), 0, 0);
    });
  }
}

// A buffer that evaluation in fp32 changes keeps the change.
TEST(EvalPrecisionTest, BuffersThatChange) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_mlp(groups, half(true));
    sharded->eval();
    {
      at::NoGradGuard no_grad;
      sharded(batch(0));
    }
    update_buffer(*sharded.module());
    sharded->train();
    sharded(batch(0)).sum().backward();
    EXPECT_TRUE(state_of(sharded).at("running").equal(at::full({5}, 1.125)));
  });
}

TEST(EvalPrecisionTest, FreezingInBetweenKeepsThePolicy) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_mlp(groups, half(true));
    Mlp plain;
    sharded->eval();
    {
      at::NoGradGuard no_grad;
      sharded(batch(0));
    }
    EXPECT_TRUE(
        sharded
            .set_trainable(
                [](const std::string& name) { return name == "l0.bias"; },
                false)
            .ok());
    {
      at::NoGradGuard no_grad;
      EXPECT_TRUE(
          at::allclose(sharded(batch(0)), plain.forward(batch(0)), 0, 1e-6));
    }
    sharded->train();
    const at::Tensor output = sharded(batch(0));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.sum().backward();
    expect_equal(state_of(sharded), state_of(plain), 0, 0);
  });
}

}  // namespace
}  // namespace fullshard
