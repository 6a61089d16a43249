#include "fullshard/optim/ema.h"

#include <cmath>

#include "ATen/ops/allclose.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/zeros.h"
#include "fullshard/optim/sharded_sgd.h"
#include "fullshard/tests/optim/golden_model.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::GoldenModel;
using ::testing::HasSubstr;
using testing::parameters_of;
using testing::run_ranks;
using testing::shard_golden_model;
using Values = std::map<std::string, at::Tensor>;

Values averages_of(const ShardedEma& ema) {
  Values all;
  EXPECT_TRUE(ema.full_state_dict(
                     [&](const std::string& name, const at::Tensor& tensor) {
                       all[name] = tensor.clone();
                       return absl::OkStatus();
                     },
                     /*all_ranks=*/true)
                  .ok());
  return all;
}

bool equal(const Values& a, const Values& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [name, value] : a) {
    if (!value.equal(b.at(name))) return false;
  }
  return true;
}

void train_step(FullyShardedModule<GoldenModel>& sharded,
                ShardedOptimizer& optimizer, int step) {
  optimizer.zero_grad();
  sharded(step).backward();
  optimizer.step();
}

TEST(ShardedEmaTest, EqualsTheAverageOfTheWholeModel) {
  for (int num_ranks : {1, 2, 3}) {
    for (auto strategy :
         {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
      run_ranks(num_ranks, [=](ProcessGroups& groups) {
        auto sharded = shard_golden_model(groups, strategy);
        ShardedSGD optimizer(sharded);
        optimizer.set_lr(0.1);
        ShardedEma ema(sharded, /*half_life_steps=*/3);
        Values expected = parameters_of(sharded);
        for (int step = 0; step < 10; ++step) {
          train_step(sharded, optimizer, step);
          ema.update();
          for (const auto& [name, value] : parameters_of(sharded)) {
            const double d = std::pow(0.5, 1.0 / 3);
            expected[name] = d * expected[name] + (1 - d) * value;
          }
        }
        for (const auto& [name, average] : averages_of(ema)) {
          EXPECT_TRUE(at::allclose(average, expected.at(name), 1e-5, 1e-6))
              << name;
        }
      });
    }
  }
}

TEST(ShardedEmaTest, HalfIsLeftAfterTheHalfLife) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    ShardedEma ema(sharded, /*half_life_steps=*/16);
    const Values before = parameters_of(sharded);
    ASSERT_TRUE(
        sharded
            .load_full_state_dict(
                [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
                  return at::zeros(before.at(name).sizes());
                })
            .ok());
    for (int step = 0; step < 16; ++step) ema.update();
    for (const auto& [name, average] : averages_of(ema)) {
      EXPECT_TRUE(at::allclose(average, before.at(name) / 2, 1e-4, 1e-6));
    }
  });
}

TEST(ShardedEmaTest, SwapInEvaluatesTheAverageAndTrainingGoesOn) {
  for (int num_ranks : {1, 3}) {
    run_ranks(num_ranks, [](ProcessGroups& groups) {
      auto sharded = shard_golden_model(groups);
      auto twin = shard_golden_model(groups);
      ShardedSGD optimizer(sharded), twin_optimizer(twin);
      ShardedEma ema(sharded, 2);
      for (int step = 0; step < 6; ++step) {
        train_step(sharded, optimizer, step);
        train_step(twin, twin_optimizer, step);
        ema.update();
        const Values averages = averages_of(ema);
        {
          ShardedEma::Scope scope(ema);
          EXPECT_TRUE(ema.swapped_in());
          EXPECT_TRUE(equal(parameters_of(sharded), averages));
          at::NoGradGuard no_grad;
          double expected = 0;
          for (int64_t place = 0; place < 4; ++place) {
            const char* const names[] = {"body.weight", "body.bias",
                                         "head.weight", "head.bias"};
            const at::Tensor& value = averages.at(names[place]);
            expected += (value * GoldenModel::gradient(value.sizes(), 5, place))
                            .sum()
                            .item<double>();
          }
          EXPECT_NEAR(sharded(5).item<double>(), expected, 1e-5);
        }
        EXPECT_TRUE(equal(averages_of(ema), averages));
      }
      EXPECT_TRUE(equal(parameters_of(sharded), parameters_of(twin)));
    });
  }
}

TEST(ShardedEmaTest, StateComesBackOnAnyNumberOfRanks) {
  run_ranks(3, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    ShardedEma ema(sharded, 2), other(sharded, 2);
    ShardedSGD optimizer(sharded);
    train_step(sharded, optimizer, 0);
    ema.update();
    const Values averages = averages_of(ema);
    EXPECT_FALSE(equal(averages, averages_of(other)));
    const auto source = [&](const std::string& name) {
      return absl::StatusOr<at::Tensor>(averages.at(name));
    };
    ASSERT_TRUE(other.load_full_state_dict(source).ok());
    EXPECT_TRUE(equal(averages, averages_of(other)));
    auto whole = shard_golden_model(groups, ShardingStrategy::kNoShard,
                                    /*in_units=*/false);
    ShardedEma replicated(whole, 2);
    ASSERT_TRUE(replicated.load_full_state_dict(source).ok());
    EXPECT_TRUE(equal(averages, averages_of(replicated)));
    const absl::Status status = other.load_full_state_dict(
        [&](const std::string&) -> absl::StatusOr<at::Tensor> {
          return at::zeros({4, 4});
        });
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("expected shape [5, 3], got [4, 4]"));
  });
}

TEST(ShardedEmaTest, MisuseIsNamed) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    EXPECT_THROW(ShardedEma(sharded, 0), c10::Error);
    ShardedEma ema(sharded, 2);
    EXPECT_THROW(ema.swap_out(), c10::Error);
    ema.swap_in();
    EXPECT_THROW(ema.swap_in(), c10::Error);
    EXPECT_THROW(ema.update(), c10::Error);
    ShardedSGD optimizer(sharded);
    train_step(sharded, optimizer, 0);
    try {
      ema.swap_out();
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("written while its average"));
    }
    EXPECT_FALSE(ema.swapped_in());
  });
}

}  // namespace
}  // namespace fullshard
