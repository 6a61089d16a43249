// What torch.optim does in 100 steps, ours does on 1, 2 and 3 ranks; and the
// state that torch.optim has after 50 is ours too, to save and to load.

#include <memory>
#include <set>

#include "ATen/ops/allclose.h"
#include "ATen/ops/tensor.h"
#include "fullshard/optim/optimizer_state.h"
#include "fullshard/optim/sharded_adagrad.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/optim/sharded_sgd.h"
#include "fullshard/sharding/sharded_state.h"
#include "fullshard/tests/optim/golden_model.h"
#include "fullshard/tests/optim/goldens.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using nlohmann::json;
using testing::GoldenModel;
using testing::parameters_of;
using testing::shard_golden_model;

at::Tensor to_tensor(const json& numbers) {
  const auto values = numbers.get<std::vector<float>>();
  return at::tensor(values);
}

std::vector<ParamGroup> groups_of(const json& item) {
  std::vector<ParamGroup> groups;
  for (const json& given : item["groups"]) {
    ParamGroup group;
    group.name = given["module"];
    group.matches = in_module(group.name);
    group.lr_scale = given["options"]["lr"].get<double>() /
                     item["options"]["lr"].get<double>();
    group.weight_decay = given["options"]["weight_decay"].get<double>();
    groups.push_back(group);
  }
  return groups;
}

std::unique_ptr<ShardedOptimizer> make_optimizer(const ShardedModule& sharded,
                                                 const json& item) {
  const json& given = item["options"];
  const auto fill = [&](auto& options) {
    options.lr = given["lr"];
    options.weight_decay = given.value("weight_decay", 0.0);
    options.decays = decays_always;
    options.maximize = given.value("maximize", false);
    options.groups = groups_of(item);
  };
  if (item["optimizer"] == "AdamW") {
    AdamWOptions options;
    fill(options);
    options.amsgrad = given.value("amsgrad", false);
    options.eps = given.value("eps", options.eps);
    if (given.contains("betas")) {
      options.beta1 = given["betas"][0];
      options.beta2 = given["betas"][1];
    }
    return std::make_unique<ShardedAdamW>(sharded, options);
  }
  if (item["optimizer"] == "SGD") {
    SgdOptions options;
    fill(options);
    options.momentum = given.value("momentum", 0.0);
    options.dampening = given.value("dampening", 0.0);
    options.nesterov = given.value("nesterov", false);
    return std::make_unique<ShardedSGD>(sharded, options);
  }
  AdagradOptions options;
  fill(options);
  options.lr_decay = given.value("lr_decay", 0.0);
  options.initial_accumulator_value =
      given.value("initial_accumulator_value", 0.0);
  options.eps = given.value("eps", options.eps);
  return std::make_unique<ShardedAdagrad>(sharded, options);
}

void expect_parameters(const ShardedModule& sharded, const json& expected) {
  for (const auto& [name, tensor] : parameters_of(sharded)) {
    EXPECT_TRUE(
        at::allclose(tensor.flatten(), to_tensor(expected[name]), 1e-5, 2e-6))
        << name << "\n"
        << tensor.flatten() << "\n"
        << expected[name];
  }
}

FullOptimizerState state_of(const json& item, const json& shapes) {
  FullOptimizerState full;
  for (const auto& [name, entry] : item["state"].items()) {
    for (const auto& [key, numbers] : entry.items()) {
      full.state[name][key] = to_tensor(numbers).view(
          key == "step" ? std::vector<int64_t>()
                        : shapes[name].get<std::vector<int64_t>>());
    }
  }
  return full;
}

void expect_state(const FullOptimizerState& ours,
                  const FullOptimizerState& expected) {
  EXPECT_EQ(ours.state.size(), expected.state.size());
  for (const auto& [name, entry] : expected.state) {
    const auto found = ours.state.find(name);
    ASSERT_NE(found, ours.state.end()) << name;
    EXPECT_EQ(found->second.size(), entry.size()) << name;
    for (const auto& [key, tensor] : entry) {
      ASSERT_EQ(found->second.count(key), 1u) << name << " " << key;
      const at::Tensor& own = found->second.at(key);
      EXPECT_EQ(own.sizes(), tensor.sizes()) << name << " " << key;
      EXPECT_TRUE(at::allclose(own, tensor, 1e-4, 1e-6)) << name << " " << key;
    }
  }
}

// As torch.optim's state_dict() has it; `params` names all of `groups`.
void expect_param_groups(const std::vector<FullOptimizerState::Group>& groups,
                         const json& expected) {
  ASSERT_EQ(groups.size(), expected.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    std::set<std::string> keys = {"params"};
    EXPECT_EQ(json(groups[g].params), expected[g]["params"]);
    for (const auto& [key, value] : groups[g].options) {
      keys.insert(key);
      ASSERT_TRUE(expected[g].contains(key)) << key;
      const json& theirs = expected[g][key];
      if (const auto* number = std::get_if<double>(&value)) {
        EXPECT_DOUBLE_EQ(*number, theirs.get<double>()) << key;
      } else if (const auto* flag = std::get_if<bool>(&value)) {
        EXPECT_EQ(*flag, theirs.get<bool>()) << key;
      } else if (const auto* pair =
                     std::get_if<std::pair<double, double>>(&value)) {
        EXPECT_EQ(json({pair->first, pair->second}), theirs) << key;
      } else {
        EXPECT_TRUE(theirs.is_null()) << key;
      }
    }
    EXPECT_EQ(keys.size(), expected[g].size());
  }
}

void train(FullyShardedModule<GoldenModel>& sharded,
           ShardedOptimizer& optimizer, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    optimizer.zero_grad();
    // Every third gradient arrives too large and is clipped to size.
    const double scale = step % 3 == 0 ? 4 : 1;
    sharded(step, scale).backward();
    if (scale != 1) optimizer.sharded_state()->pending_gradient_scale = 0.25;
    optimizer.step();
  }
}

void run_case(ProcessGroups& groups, const json& item, const json& shapes) {
  auto sharded = shard_golden_model(groups);
  const auto optimizer = make_optimizer(sharded, item);
  train(sharded, *optimizer, 0, 1);
  expect_parameters(sharded, item["after_1"]);
  train(sharded, *optimizer, 1, 50);
  expect_parameters(sharded, item["after_50"]);
  const FullOptimizerState expected = state_of(item, shapes);
  const auto full = full_optimizer_state(*optimizer, /*all_ranks=*/true);
  ASSERT_TRUE(full.ok()) << full.status();
  expect_state(*full, expected);
  expect_param_groups(full->param_groups, item["param_groups"]);
  train(sharded, *optimizer, 50, 100);
  expect_parameters(sharded, item["after_100"]);

  // From the state of torch.optim.
  auto resumed = shard_golden_model(groups);
  const absl::Status loaded = resumed.load_full_state_dict(
      [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
        return to_tensor(item["after_50"][name])
            .view(shapes[name].get<std::vector<int64_t>>());
      });
  ASSERT_TRUE(loaded.ok()) << loaded;
  const auto second = make_optimizer(resumed, item);
  const absl::Status state = load_full_optimizer_state(expected, *second);
  ASSERT_TRUE(state.ok()) << state;
  train(resumed, *second, 50, 100);
  expect_parameters(resumed, item["after_100"]);
}

void run_all(const std::string& optimizer, int num_ranks) {
  testing::run_ranks(num_ranks, [&](ProcessGroups& groups) {
    const json golden = testing::read_golden("optimizers.json");
    int num_cases = 0;
    for (const json& item : golden["cases"]) {
      if (item["optimizer"] != optimizer) continue;
      SCOPED_TRACE(item["options"].dump());
      run_case(groups, item, golden["shapes"]);
      ++num_cases;
    }
    EXPECT_GE(num_cases, 3);
  });
}

TEST(OptimizerGoldenTest, AdamWOn1Rank) { run_all("AdamW", 1); }
TEST(OptimizerGoldenTest, AdamWOn2Ranks) { run_all("AdamW", 2); }
TEST(OptimizerGoldenTest, AdamWOn3Ranks) { run_all("AdamW", 3); }
TEST(OptimizerGoldenTest, SgdOn1Rank) { run_all("SGD", 1); }
TEST(OptimizerGoldenTest, SgdOn2Ranks) { run_all("SGD", 2); }
TEST(OptimizerGoldenTest, SgdOn3Ranks) { run_all("SGD", 3); }
TEST(OptimizerGoldenTest, AdagradOn1Rank) { run_all("Adagrad", 1); }
TEST(OptimizerGoldenTest, AdagradOn2Ranks) { run_all("Adagrad", 2); }
TEST(OptimizerGoldenTest, AdagradOn3Ranks) { run_all("Adagrad", 3); }

}  // namespace
}  // namespace fullshard
