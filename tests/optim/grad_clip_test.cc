#include "fullshard/optim/grad_clip.h"

#include <cmath>
#include <limits>
#include <map>

#include "ATen/ops/allclose.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/full.h"
#include "ATen/ops/linalg_vector_norm.h"
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

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kStep = 11;
const char* const kNames[] = {"body.weight", "body.bias", "head.weight",
                              "head.bias"};

// The gradients of kStep by name, times `scale`, in double.
std::map<std::string, at::Tensor> gradients(double scale = 1) {
  const std::vector<int64_t> sizes[] = {{5, 3}, {5}, {3, 7}, {3}};
  std::map<std::string, at::Tensor> all;
  for (int64_t place = 0; place < 4; ++place) {
    all[kNames[place]] =
        GoldenModel::gradient(sizes[place], kStep, place).to(at::kDouble) *
        scale;
  }
  return all;
}

double norm_of(const std::vector<std::string>& names, double p,
               double scale = 1) {
  const auto all = gradients(scale);
  std::vector<at::Tensor> parts;
  for (const std::string& name : names) parts.push_back(all.at(name).flatten());
  const at::Tensor values = at::cat(parts);
  // By its largest element, lest a large p overflows.
  const double largest = values.abs().max().item<double>();
  return largest * at::linalg_vector_norm(values / largest, p).item<double>();
}

std::vector<std::string> all_names() { return {kNames, kNames + 4}; }

// The gradient as an SGD step at rate 1 shows it. Collective.
std::map<std::string, at::Tensor> applied(
    FullyShardedModule<GoldenModel>& sharded, ShardedSGD& optimizer) {
  auto before = parameters_of(sharded);
  optimizer.step();
  for (auto& [name, value] : parameters_of(sharded)) before[name] -= value;
  return before;
}

SgdOptions rate_1() {
  SgdOptions options;
  options.lr = 1;
  return options;
}

TEST(GradNormsTest, EveryOrder) {
  for (int num_ranks : {1, 2, 3}) {
    run_ranks(num_ranks, [](ProcessGroups& groups) {
      auto sharded = shard_golden_model(groups);
      sharded(kStep).backward();
      for (double p : {0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 10.0, 300.0, kInfinity}) {
        GradNormOptions options;
        options.p = p;
        const double expected = norm_of(all_names(), p);
        EXPECT_NEAR(grad_norms(sharded, options)->total / expected, 1, 1e-6)
            << "p = " << p;
      }
    });
  }
}

TEST(GradNormsTest, LargeAndSmallValuesAtLargeOrders) {
  run_ranks(2, [](ProcessGroups& groups) {
    for (double scale : {1e-25, 1e25}) {
      auto sharded = shard_golden_model(groups);
      sharded(kStep, scale).backward();
      for (double p : {3.0, 10.0, kInfinity}) {
        GradNormOptions options;
        options.p = p;
        const double expected = norm_of(all_names(), p, scale);
        EXPECT_NEAR(grad_norms(sharded, options)->total / expected, 1, 1e-6)
            << "p = " << p << ", scale " << scale;
      }
    }
  });
}

// One parameter, whose shard is a whole number of rows.
struct Large : torch::nn::Module {
  Large() : weight(register_parameter("weight", at::full({4096}, 0.5f))) {}
  at::Tensor forward() { return (weight * weight).sum(); }
  at::Tensor weight;
};

TEST(GradNormsTest, WholeRows) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<Large>(), groups).value();
    sharded().backward();
    for (double p : {1.0, 2.0, 4.0, kInfinity}) {
      GradNormOptions options;
      options.p = p;
      EXPECT_NEAR(grad_norms(sharded, options)->total,
                  std::isinf(p) ? 1 : std::pow(4096, 1 / p), 1e-3);
    }
  });
}

TEST(GradNormsTest, ByModuleAndGroup) {
  for (bool in_units : {false, true}) {
    run_ranks(3, [=](ProcessGroups& groups) {
      auto sharded =
          shard_golden_model(groups, ShardingStrategy::kFullShard, in_units);
      sharded(kStep).backward();
      for (double p : {1.0, 2.0, 3.0, kInfinity}) {
        GradNormOptions options;
        options.p = p;
        options.module_of = module_at_depth(1);
        options.groups = {{"biases", [](const std::string&, const auto& sizes) {
                             return sizes.size() == 1;
                           }}};
        const GradNorms norms = grad_norms(sharded, options).value();
        EXPECT_NEAR(norms.total, norm_of(all_names(), p), 1e-5);
        EXPECT_NEAR(norms.groups[0], norm_of({"body.bias", "head.bias"}, p),
                    1e-5);
        EXPECT_NEAR(norms.rest, norm_of({"body.weight", "head.weight"}, p),
                    1e-5);
        ASSERT_EQ(norms.modules.size(), 3u);
        EXPECT_EQ(norms.modules[0].first, "body");
        EXPECT_NEAR(norms.modules[0].second,
                    norm_of({"body.weight", "body.bias"}, p), 1e-5);
        EXPECT_EQ(norms.modules[1].first, "head");
        EXPECT_NEAR(norms.modules[1].second,
                    norm_of({"head.weight", "head.bias"}, p), 1e-5);
        EXPECT_EQ(norms.modules[2].first, "unused");
        EXPECT_EQ(norms.modules[2].second, 0);
      }
    });
  }
}

TEST(ClipGradNormsTest, WholeModelForEveryOrder) {
  for (auto strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
    run_ranks(2, [=](ProcessGroups& groups) {
      for (double p : {0.5, 1.0, 2.0, 3.0, kInfinity}) {
        auto sharded = shard_golden_model(groups, strategy);
        ShardedSGD optimizer(sharded, rate_1());
        sharded(kStep).backward();
        GradNormOptions options;
        options.p = p;
        const double norm = norm_of(all_names(), p);
        EXPECT_NEAR(clip_grad_norms(sharded, norm / 4, options)->total / norm,
                    1, 1e-6);
        EXPECT_NEAR(grad_norms(sharded, options)->total / norm, 0.25, 1e-5);
        const auto expected = gradients(0.25);
        for (auto& [name, value] : applied(sharded, optimizer)) {
          if (expected.count(name) == 0) continue;
          EXPECT_TRUE(at::allclose(value.to(at::kDouble), expected.at(name),
                                   1e-4, 1e-6))
              << name << " p = " << p;
        }
      }
    });
  }
}

TEST(ClipGradNormsTest, EveryGroupByItsOwnNorm) {
  for (bool in_units : {false, true}) {
    run_ranks(3, [=](ProcessGroups& groups) {
      auto sharded =
          shard_golden_model(groups, ShardingStrategy::kFullShard, in_units);
      ShardedSGD optimizer(sharded, rate_1());
      sharded(kStep).backward();
      GradNormOptions options;
      options.groups = {
          {"body", in_module("body"), 0.5},
          {"head weight", [](const std::string& name, const auto&) {
             return name == "head.weight";
           }}};
      const GradNorms norms = clip_grad_norms(sharded, 0.1, options).value();
      const double body = norm_of({"body.weight", "body.bias"}, 2);
      const double bias = norm_of({"head.bias"}, 2);
      EXPECT_NEAR(norms.groups[0], body, 1e-5);
      EXPECT_NEAR(norms.rest, bias, 1e-5);
      const std::map<std::string, double> scales = {{"body.weight", 0.5 / body},
                                                    {"body.bias", 0.5 / body},
                                                    {"head.weight", 1},
                                                    {"head.bias", 0.1 / bias}};
      const auto all = gradients();
      for (auto& [name, value] : applied(sharded, optimizer)) {
        if (all.count(name) == 0) continue;
        EXPECT_TRUE(at::allclose(value.to(at::kDouble),
                                 all.at(name) * scales.at(name), 1e-4, 1e-6))
            << name;
      }
    });
  }
}

TEST(ClipGradNormsTest, NonFiniteIsSeenOnEveryRankForEveryOrder) {
  for (double bad : {kInfinity, std::nan("")}) {
    run_ranks(3, [=](ProcessGroups& groups) {
      for (double p : {0.5, 1.0, 2.0, 3.0, kInfinity}) {
        auto sharded = shard_golden_model(groups);
        sharded(kStep).backward();
        for (const LocalParameter& local : sharded.named_local_parameters()) {
          if (groups.rank() == 1 && local.name == "head.weight") {
            local.tensor.mutable_grad()[0] = bad;
          }
        }
        GradNormOptions options;
        options.p = p;
        const double total = grad_norms(sharded, options)->total;
        EXPECT_EQ(std::isnan(total), std::isnan(bad)) << "p = " << p;
        EXPECT_FALSE(std::isfinite(total)) << "p = " << p;
        options.error_if_nonfinite = true;
        EXPECT_EQ(clip_grad_norms(sharded, 1, options).status().code(),
                  absl::StatusCode::kFailedPrecondition);
      }
    });
  }
}

TEST(ClipGradNormsTest, WithoutGradientsAllNormsAreZero) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    for (double p : {0.5, 2.0, kInfinity}) {
      GradNormOptions options;
      options.p = p;
      EXPECT_EQ(clip_grad_norms(sharded, 1, options)->total, 0);
    }
  });
}

TEST(ClipGradNormsTest, OptionsOutOfRangeAreNamed) {
  run_ranks(1, [](ProcessGroups& groups) {
    auto sharded = shard_golden_model(groups);
    GradNormOptions options;
    for (double p : {0.0, -1.0, std::nan("")}) {
      options.p = p;
      EXPECT_THAT(
          std::string(clip_grad_norms(sharded, 1, options).status().message()),
          HasSubstr("p above 0"));
    }
    options.p = 2;
    options.groups = {{"nobody", in_module("nowhere")}};
    EXPECT_THAT(
        std::string(clip_grad_norms(sharded, 1, options).status().message()),
        HasSubstr("'nobody' matches no trainable parameter"));
  });
}

TEST(ModuleAtDepthTest, CutsThePath) {
  EXPECT_EQ(module_at_depth(2)("llm.layers.3.up.bias"), "llm.layers");
  EXPECT_EQ(module_at_depth(9)("llm.layers.3.up.bias"), "llm.layers.3.up");
  EXPECT_EQ(module_at_depth(1)("scale"), "");
  EXPECT_EQ(module_at_depth(0)("llm.norm.weight"), "");
}

}  // namespace
}  // namespace fullshard
