#include "fullshard/optim/optimizer_state.h"

#include "ATen/ops/allclose.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "fullshard/optim/sharded_adagrad.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/optim/sharded_sgd.h"
#include "fullshard/tests/optim/golden_model.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using ::testing::ElementsAre;
using testing::GoldenModel;
using ::testing::HasSubstr;
using testing::parameters_of;
using testing::run_ranks;
using testing::shard_golden_model;

void train(FullyShardedModule<GoldenModel>& sharded,
           ShardedOptimizer& optimizer, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    optimizer.zero_grad();
    sharded(step).backward();
    optimizer.step();
  }
}

std::map<std::string, int64_t> steps_of(const ShardedOptimizer& optimizer) {
  std::map<std::string, int64_t> steps;
  for (const LocalOptimizerState& local : optimizer.local_state()) {
    steps[local.name] = local.step;
  }
  return steps;
}

std::string message(const absl::Status& status) {
  return std::string(status.message());
}

bool equal_states(const FullOptimizerState& a, const FullOptimizerState& b,
                  double rtol = 0) {
  if (a.state.size() != b.state.size()) return false;
  for (const auto& [name, entry] : a.state) {
    const auto found = b.state.find(name);
    if (found == b.state.end() || found->second.size() != entry.size()) {
      return false;
    }
    for (const auto& [key, tensor] : entry) {
      if (!at::allclose(tensor, found->second.at(key), rtol, /*atol=*/0)) {
        return false;
      }
    }
  }
  return true;
}

TEST(OptimizerStateTest, LocalRangesCoverEveryParameter) {
  for (int num_ranks : {1, 2, 3}) {
    run_ranks(num_ranks, [](ProcessGroups& groups) {
      auto sharded = shard_golden_model(groups);
      ShardedAdamW optimizer(sharded);
      train(sharded, optimizer, 0, 2);
      const auto locals = optimizer.local_state();
      std::vector<std::string> names;
      at::Tensor counts = at::zeros({6}, at::kLong);
      for (size_t i = 0; i < locals.size(); ++i) {
        const LocalOptimizerState& local = locals[i];
        names.push_back(local.name);
        counts[static_cast<int64_t>(i)] = local.numel;
        EXPECT_EQ(local.step, i < 4 ? 2 : 0) << local.name;
        ASSERT_EQ(local.tensors.size(), 2u);
        EXPECT_EQ(local.tensors[0].first, "exp_avg");
        EXPECT_EQ(local.tensors[1].first, "exp_avg_sq");
        EXPECT_EQ(local.tensors[0].second.numel(), local.numel);
      }
      EXPECT_THAT(names,
                  ElementsAre("body.weight", "body.bias", "head.weight",
                              "head.bias", "unused.weight", "unused.bias"));
      std::vector<at::Tensor> tensors = {counts};
      groups.world()->allreduce(tensors)->wait();
      const auto* total = counts.const_data_ptr<int64_t>();
      EXPECT_THAT(std::vector<int64_t>(total, total + 6),
                  ElementsAre(15, 5, 21, 3, 4, 2));
    });
  }
}

TEST(OptimizerStateTest, NothingIsSavedBeforeTheFirstStepButByAdagrad) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    EXPECT_TRUE(
        full_optimizer_state(ShardedAdamW(sharded), true)->state.empty());
    SgdOptions sgd;
    sgd.momentum = 0.9;
    EXPECT_TRUE(
        full_optimizer_state(ShardedSGD(sharded, sgd), true)->state.empty());
    AdagradOptions adagrad;
    adagrad.initial_accumulator_value = 2;
    const auto full =
        full_optimizer_state(ShardedAdagrad(sharded, adagrad), true);
    EXPECT_EQ(full->state.size(), 6u);
    const auto& entry = full->state.at("head.weight");
    EXPECT_TRUE(entry.at("sum").equal(at::full({3, 7}, 2.f)));
    EXPECT_EQ(entry.at("step").item<double>(), 0);
  });
}

TEST(OptimizerStateTest, OnlyRank0ReceivesUnlessAskedOtherwise) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    ShardedAdamW optimizer(sharded);
    train(sharded, optimizer, 0, 1);
    EXPECT_EQ(full_optimizer_state(optimizer)->state.size(),
              groups.rank() == 0 ? 4u : 0u);
  });
}

TEST(OptimizerStateTest, NoShardIsTheSame) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto full = shard_golden_model(groups);
    auto replicated = shard_golden_model(groups, ShardingStrategy::kNoShard);
    ShardedAdamW a(full), b(replicated);
    train(full, a, 0, 3);
    train(replicated, b, 0, 3);
    const FullOptimizerState shards = *full_optimizer_state(a, true);
    FullOptimizerState replicas = *full_optimizer_state(b, true);
    // Replicas cannot tell "no gradient" from zero.
    replicas.state.erase("unused.weight");
    replicas.state.erase("unused.bias");
    // The kernels round differently where a vector ends.
    EXPECT_TRUE(equal_states(shards, replicas, /*rtol=*/1e-4));
  });
}

TEST(OptimizerStateTest, UnitsMayDifferFromThoseThatSaved) {
  run_ranks(3, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    ShardedAdamW optimizer(sharded);
    train(sharded, optimizer, 0, 5);
    const auto saved = full_optimizer_state(optimizer, true);
    const auto values = parameters_of(sharded);
    auto whole = shard_golden_model(groups, ShardingStrategy::kFullShard,
                                    /*in_units=*/false);
    ASSERT_TRUE(whole
                    .load_full_state_dict([&](const std::string& name) {
                      return absl::StatusOr<at::Tensor>(values.at(name));
                    })
                    .ok());
    ShardedAdamW second(whole);
    ASSERT_TRUE(load_full_optimizer_state(*saved, second).ok());
    // One flat parameter whose parts differ in their step.
    EXPECT_EQ(steps_of(second), steps_of(optimizer));
    EXPECT_TRUE(equal_states(*saved, *full_optimizer_state(second, true)));
    train(sharded, optimizer, 5, 8);
    train(whole, second, 5, 8);
    EXPECT_EQ(steps_of(second)["body.weight"], 8);
    EXPECT_EQ(steps_of(second)["unused.bias"], 3);
    const auto trained = parameters_of(whole);
    for (const auto& [name, value] : parameters_of(sharded)) {
      if (name == "unused.weight") continue;  // A zero gradient: it decays.
      EXPECT_TRUE(at::allclose(value, trained.at(name), 1e-5, 1e-7)) << name;
    }
  });
}

TEST(OptimizerStateTest, LocalStateComesBack) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    AdamWOptions options;
    options.amsgrad = true;
    ShardedAdamW optimizer(sharded, options), other(sharded, options);
    train(sharded, optimizer, 0, 3);
    ASSERT_TRUE(other.load_local_state(optimizer.local_state()).ok());
    EXPECT_TRUE(equal_states(*full_optimizer_state(optimizer, true),
                             *full_optimizer_state(other, true)));
    auto wrong = optimizer.local_state();
    wrong[0].parameter_offset += 1;
    EXPECT_THAT(message(other.load_local_state(wrong)),
                HasSubstr("'body.weight': expected"));
    wrong.erase(wrong.begin());
    EXPECT_EQ(other.load_local_state(wrong).code(),
              absl::StatusCode::kNotFound);
  });
}

TEST(OptimizerStateTest, WhatDoesNotFitIsRefusedAndNothingChanges) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    ShardedAdamW optimizer(sharded), other(sharded);
    train(sharded, optimizer, 0, 2);
    const FullOptimizerState good = *full_optimizer_state(optimizer, true);
    auto load = [&](const FullOptimizerState& state) {
      return message(load_full_optimizer_state(state, other));
    };
    FullOptimizerState bad = good;
    bad.state["head.bias"].erase("exp_avg_sq");
    EXPECT_THAT(load(bad), HasSubstr("'head.bias': 'exp_avg_sq' is missing"));
    bad = good;
    bad.state["head.bias"].erase("step");
    EXPECT_THAT(load(bad), HasSubstr("'step' is missing"));
    bad.state["head.bias"]["step"] = at::full({}, 1.5);
    EXPECT_THAT(load(bad), HasSubstr("whole number as step"));
    bad = good;
    bad.state["body.bias"]["exp_avg"] = at::zeros({4});
    EXPECT_THAT(load(bad), HasSubstr("of shape [5], got [4]"));
    bad = good;
    bad.state["module.body.bias"] = good.state.at("body.bias");
    EXPECT_THAT(load(bad), HasSubstr("trains no parameter of that name"));
    AdamWOptions options;
    options.amsgrad = true;
    ShardedAdamW amsgrad(sharded, options);
    EXPECT_THAT(message(load_full_optimizer_state(good, amsgrad)),
                HasSubstr("'max_exp_avg_sq' is missing"));
    EXPECT_TRUE(full_optimizer_state(other, true)->state.empty());
    EXPECT_TRUE(load_full_optimizer_state(good, other).ok());
  });
}

TEST(OptimizerStateTest, SinkThatFailsIsReportedOnEveryRank) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    ShardedAdamW optimizer(sharded);
    train(sharded, optimizer, 0, 1);
    const absl::Status status = stream_optimizer_state(
        optimizer,
        [](const std::string&, const std::string&, const at::Tensor&) {
          return absl::ResourceExhaustedError("disk full");
        });
    EXPECT_EQ(status.code(), groups.rank() == 0
                                 ? absl::StatusCode::kResourceExhausted
                                 : absl::StatusCode::kAborted);
  });
}

// One permuted parameter of 6 elements on 4 ranks: two own nothing.
struct Permuted : torch::nn::Module {
  Permuted()
      : weight(register_parameter("weight", at::zeros({3, 2}).t())),
        tied(register_parameter("tied", weight)) {}
  at::Tensor forward(const at::Tensor& gradient) {
    return (weight * gradient).sum();
  }
  at::Tensor weight, tied;
};

TEST(OptimizerStateTest, PermutedMemoryTiedNamesAndEmptyShards) {
  run_ranks(4, [](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<Permuted>(), groups).value();
    SgdOptions options;
    options.momentum = 0.9;
    ShardedSGD optimizer(sharded, options), other(sharded, options);
    const at::Tensor gradient = at::arange(6, at::kFloat).view({2, 3});
    sharded(gradient).backward();
    optimizer.step();
    EXPECT_EQ(optimizer.local_state()[0].numel == 0, groups.rank() >= 2);
    FullOptimizerState full = *full_optimizer_state(optimizer, true);
    ASSERT_EQ(full.state.size(), 1u);
    EXPECT_TRUE(full.state["weight"]["momentum_buffer"].equal(gradient));
    full.state["tied"] = {{"momentum_buffer", gradient.clone()}};
    full.state.erase("weight");
    ASSERT_TRUE(load_full_optimizer_state(full, other).ok());
    full = *full_optimizer_state(other, true);
    EXPECT_TRUE(full.state["weight"]["momentum_buffer"].equal(gradient));
  });
}

TEST(ParamGroupsTest, FirstMatchWinsAndDecayFollowsTheShape) {
  run_ranks(1, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    AdamWOptions options;
    options.lr = 0.1;
    options.weight_decay = 0.5;
    ParamGroup head, wide;
    head.name = "head";
    head.matches = in_module("head");
    head.lr_scale = 0.1;
    wide.name = "wide";
    wide.matches = [](const std::string&, const std::vector<int64_t>& sizes) {
      return sizes.back() >= 3;
    };
    wide.weight_decay = 0.25;
    options.groups = {head, wide};
    ShardedAdamW optimizer(sharded, options);
    std::string table;
    for (const OptimizerGroup& group : optimizer.groups()) {
      absl::StrAppend(&table, group.name, " ", group.lr, " ",
                      group.weight_decay, " ",
                      absl::StrJoin(group.parameters, " "), "\n");
    }
    EXPECT_EQ(table,
              "head 0.01 0.5 head.weight\n"
              "head/no_decay 0.01 0 head.bias\n"
              "wide 0.1 0.25 body.weight\n"
              "wide/no_decay 0.1 0 body.bias\n"
              "default 0.1 0.5 unused.weight\n"
              "default/no_decay 0.1 0 unused.bias\n");
    optimizer.set_lr(1);
    EXPECT_DOUBLE_EQ(optimizer.groups()[0].lr, 0.1);
    EXPECT_DOUBLE_EQ(optimizer.groups()[2].lr, 1);
    optimizer.set_group_lr(0, 7);
    EXPECT_DOUBLE_EQ(optimizer.groups()[0].lr, 7);
    EXPECT_THROW(optimizer.set_group_lr(6, 1), c10::Error);
  });
}

TEST(ParamGroupsTest, OptionsOutOfRangeAreNamed) {
  run_ranks(1, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    auto expect_error = [&](auto make, const std::string& what) {
      try {
        make();
        ADD_FAILURE() << "no error: " << what;
      } catch (const c10::Error& error) {
        EXPECT_THAT(error.what(), HasSubstr(what));
      }
    };
    AdamWOptions adamw;
    adamw.groups = {{"none", in_module("nowhere"), 1, {}}};
    expect_error([&] { ShardedAdamW optimizer(sharded, adamw); },
                 "group 'none' matches no trainable parameter");
    adamw = {};
    adamw.beta2 = 1;
    expect_error([&] { ShardedAdamW optimizer(sharded, adamw); }, "betas");
    adamw = {};
    adamw.lr = -1;
    expect_error([&] { ShardedAdamW optimizer(sharded, adamw); },
                 "expected lr of 0 or more, got -1");
    SgdOptions sgd;
    sgd.nesterov = true;
    expect_error([&] { ShardedSGD optimizer(sharded, sgd); }, "nesterov");
    AdagradOptions adagrad;
    adagrad.eps = -1;
    expect_error([&] { ShardedAdagrad optimizer(sharded, adagrad); }, "eps");
  });
}

}  // namespace
}  // namespace fullshard
