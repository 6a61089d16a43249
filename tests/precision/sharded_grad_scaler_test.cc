#include "fullshard/precision/sharded_grad_scaler.h"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/optim/sharded_sgd.h"
#include "fullshard/sharding/gradient_reducer.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/sgd.h"

namespace fullshard {
namespace {

using ::testing::HasSubstr;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::state_of;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Scalar : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", at::ones({1}));
  at::Tensor forward(const at::Tensor& x) { return (weight * x).sum(); }
};

// Rank 1 owns nothing of the one element; rank 1 sees the infinity.
TEST(ShardedGradScalerTest, EqualsTorchsScaler) {
  std::ifstream file("tests/precision/goldens/grad_scaler.json");
  ASSERT_TRUE(file.good()) << "run from the workspace's root";
  const nlohmann::json goldens = nlohmann::json::parse(file);
  ASSERT_EQ(goldens["cases"].size(), 15u);
  run_ranks(2, [&](ProcessGroups& groups) {
    for (const auto& golden : goldens["cases"]) {
      auto sharded = fully_shard(std::make_shared<Scalar>(), groups).value();
      SgdOptions sgd;
      sgd.lr = 0.125;
      ShardedSGD optimizer(sharded, sgd);
      GradScalerOptions options;
      options.growth_interval = golden["interval"].get<int64_t>();
      ShardedGradScaler scaler(sharded, options);
      const auto flags = golden["flags"].get<std::string>();
      for (size_t i = 0; i < flags.size(); ++i) {
        const bool bad = flags[i] == 'x';
        optimizer.zero_grad();
        const at::Tensor x =
            at::full({1}, bad && groups.rank() == 1 ? kInfinity : 1.0f);
        scaler.scale(sharded(x)).backward();
        EXPECT_EQ(scaler.step(optimizer), !bad);
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), golden["scales"][i].get<double>());
        EXPECT_EQ(scaler.state().growth_tracker,
                  golden["trackers"][i].get<int64_t>());
        EXPECT_EQ(state_of(sharded).at("weight").item<double>(),
                  golden["weights"][i].get<double>());
      }
    }
  });
}

// Clipping sees unscaled gradients, and the optimizer what was clipped.
TEST(ShardedGradScalerTest, ClipAfterUnscale) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto scaled = testing::shard_mlp(groups),
         plain = testing::shard_mlp(groups);
    ShardedAdamW first(scaled), second(plain);
    ShardedGradScaler scaler(scaled);
    for (int step = 0; step < 3; ++step) {
      scaler.scale(scaled(testing::batch(groups.rank())).sum()).backward();
      plain(testing::batch(groups.rank())).sum().backward();
      scaler.unscale();
      EXPECT_NEAR(scaled.clip_grad_norm(0.5), plain.clip_grad_norm(0.5), 1e-5);
      EXPECT_TRUE(scaler.step(first));
      scaler.update();
      second.step();
      first.zero_grad(), second.zero_grad();
    }
    testing::expect_equal(state_of(scaled), state_of(plain));
  });
}

TEST(ShardedGradScalerTest, TorchOptimizer) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<Scalar>(), groups).value();
    std::vector<at::Tensor> tensors;
    for (auto& local : sharded.named_local_parameters()) {
      tensors.push_back(local.tensor);
    }
    std::unique_ptr<torch::optim::SGD> sgd;
    if (!tensors.empty())
      sgd = std::make_unique<torch::optim::SGD>(tensors, 0.5);
    ShardedGradScaler scaler(sharded);
    scaler.scale(sharded(at::full({1}, 0.5))).backward();
    EXPECT_TRUE(scaler.step([&] {
      if (sgd) sgd->step();
    }));
    scaler.update();
    EXPECT_EQ(state_of(sharded).at("weight").item<double>(), 0.75);
  });
}

void expect_error(const std::function<void()>& call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "expected an error with: " << text;
  } catch (const c10::Error& error) {
    EXPECT_THAT(std::string(error.what_without_backtrace()), HasSubstr(text));
  }
}

TEST(ShardedGradScalerTest, Misuse) {
  run_ranks(1, [](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<Scalar>(), groups).value();
    ShardedSGD optimizer(sharded);
    ShardedGradScaler scaler(sharded);
    expect_error([&] { scaler.update(); }, "no gradient was checked");
    scaler.scale(sharded(at::ones({1}))).backward();
    scaler.unscale();
    expect_error([&] { scaler.unscale(); }, "unscale() was called already");
    scaler.step(optimizer);
    expect_error([&] { scaler.step(optimizer); }, "step() was called already");
    scaler.update();
    optimizer.set_step_in_backward(true);
    expect_error([&] { scaler.unscale(); }, "optimizer in backward");
    GradScalerOptions options;
    options.backoff_factor = 2;
    expect_error([&] { ShardedGradScaler wrong(sharded, options); },
                 "expected a backoff_factor between 0 and 1, got 2");
    expect_error([&] { scaler.load_state({0, 0}); }, "scale above 0, got 0");
  });
}

TEST(ShardedGradScalerTest, StateComesBack) {
  run_ranks(1, [](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<Scalar>(), groups).value();
    ShardedGradScaler first(sharded), second(sharded);
    first.load_state({1024, 7});
    second.load_state(first.state());
    EXPECT_EQ(second.get_scale(), 1024);
    EXPECT_EQ(second.state().growth_tracker, 7);
  });
}

TEST(PredivideTest, FactorsOfTorchDistributed) {
  const std::vector<std::pair<int, double>> expected = {
      {1, 1}, {2, 2},  {3, 2},  {4, 2},  {6, 4},
      {8, 4}, {16, 4}, {32, 8}, {64, 8}, {128, 16}};
  for (const auto& [ranks, factor] : expected) {
    EXPECT_EQ(internal::predivide_factor(ranks), factor) << ranks;
  }
}

// The sum over ranks, 120,000, is beyond what fp16 holds; their mean is not.
TEST(HalfPrecisionTest, ReductionsDoNotOverflow) {
  for (const char* backend : {"shm", "gloo"}) {
    for (int shards : {4, 2, 1}) {
      RunRanksOptions run;
      run.backend = backend;
      run.shard_group_size = shards;
      run_ranks(
          4,
          [](ProcessGroups& groups) {
            ShardOptions options;
            options.strategy = ShardingStrategy::kHybridShard;
            options.mixed_precision.reduce_dtype = at::kHalf;
            auto sharded =
                fully_shard(std::make_shared<Scalar>(), groups, options)
                    .value();
            sharded(at::full({1}, 30000.0f)).backward();
            EXPECT_EQ(sharded.clip_grad_norm(1e9), 30000);
          },
          run);
    }
  }
}

// An fp16 model under the scaler learns what an fp32 one does.
TEST(HalfPrecisionTest, TrainsLikeFp32) {
  for (const char* backend : {"shm", "gloo"}) {
    RunRanksOptions run;
    run.backend = backend;
    run_ranks(
        2,
        [](ProcessGroups& groups) {
          ShardOptions half = testing::layer_units();
          half.mixed_precision.param_dtype = at::kHalf;
          half.mixed_precision.buffer_dtype = at::kHalf;
          half.mixed_precision.output_dtype = at::kFloat;
          auto model = testing::shard_mlp(groups, half);
          auto reference = testing::shard_mlp(groups);
          AdamWOptions options;
          options.lr = 0.01;
          ShardedAdamW first(model, options), second(reference, options);
          ShardedGradScaler scaler(model);
          const auto loss = [&](auto& sharded) {
            return sharded(testing::batch(groups.rank())).pow(2).mean();
          };
          double start = 0, got = 0, expected = 0;
          for (int step = 0; step < 40; ++step) {
            const at::Tensor a = loss(model), b = loss(reference);
            got = a.template item<double>();
            expected = b.template item<double>();
            if (step == 0) start = got;
            scaler.scale(a).backward();
            b.backward();
            scaler.step(first);
            scaler.update();
            second.step();
            first.zero_grad(), second.zero_grad();
          }
          EXPECT_LT(got, 0.5 * start);
          EXPECT_NEAR(got, expected, 0.02);
        },
        run);
  }
}

}  // namespace
}  // namespace fullshard
