#include "fullshard/precision/mixed_precision.h"

#include <cmath>
#include <map>

#include "ATen/ATen.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {
namespace {

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

struct Buffered : torch::nn::Module {
  Buffered() {
    linear = register_module("linear", torch::nn::Linear(4, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    exact = register_buffer("exact", at::full({2}, 1 + 1.0 / 1024));
    count = register_buffer("count", at::full({1}, 7, at::kLong));
  }
  at::Tensor forward(at::Tensor x) {
    dtypes = {x.scalar_type(),
              linear->weight.scalar_type(),
              norm->weight.scalar_type(),
              norm->running_mean.scalar_type(),
              exact.scalar_type(),
              count.scalar_type()};
    return norm(linear(x));
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor exact, count;
  std::vector<at::ScalarType> dtypes;
};

TEST(MixedPrecisionTest, DtypesInForwardAndExactValuesInTheStateDict) {
  for (at::ScalarType half : {at::kBFloat16, at::kHalf}) {
    testing::run_ranks(2, [half](ProcessGroups& groups) {
      at::manual_seed(1);
      auto model = std::make_shared<Buffered>();
      const at::Tensor weight = model->linear->weight.detach().clone();
      ShardOptions options;
      options.mixed_precision.param_dtype = half;
      options.mixed_precision.buffer_dtype = half;
      options.mixed_precision.output_dtype = at::kFloat;
      auto sharded = fully_shard(model, groups, options).value();
      const at::Tensor y = sharded(at::ones({4, 4}));
      EXPECT_EQ(y.scalar_type(), at::kFloat);
      // BatchNorm stays as it is.
      EXPECT_EQ(model->dtypes,
                (std::vector<at::ScalarType>{half, half, at::kFloat, at::kFloat,
                                             half, at::kLong}));
      y.sum().backward();
      auto state = state_of(sharded);
      EXPECT_TRUE(state["linear.weight"].equal(weight));
      EXPECT_EQ(state["norm.running_mean"].scalar_type(), at::kFloat);
      EXPECT_EQ(state["norm.num_batches_tracked"].item<int64_t>(), 1);
      EXPECT_TRUE(state["exact"].equal(at::full({2}, 1 + 1.0 / 1024)));
      EXPECT_EQ(state["count"].item<int64_t>(), 7);
    });
  }
}

// What no other rank can change: bf16 gradients of two ranks, whose mean has
// 8 bits too, are the same in both.
TEST(MixedPrecisionTest, KeepsLowPrecisionGradientsOnRequest) {
  for (const char* backend : {"shm", "gloo"}) {
    testing::RunRanksOptions run;
    run.backend = backend;
    testing::run_ranks(
        2,
        [](ProcessGroups& groups) {
          const auto train = [&](bool keep) {
            at::manual_seed(1);
            ShardOptions options;
            options.mixed_precision.param_dtype = at::kBFloat16;
            options.mixed_precision.keep_low_precision_grads = keep;
            auto sharded =
                fully_shard(torch::nn::Linear(8, 8), groups, options).value();
            ShardedAdamW optimizer(sharded, {.lr = 0.1});
            for (int step = 0; step < 3; ++step) {
              for (int micro = 0; micro < 2; ++micro) {
                sharded(at::ones({1, 8})).sum().backward();
              }
              const MemoryUse use = sharded.memory_use();
              EXPECT_EQ(use.gradients, keep ? use.masters / 2 : use.masters);
              EXPECT_EQ(sharded.plan().total.gradient_bytes,
                        keep ? 40 * 2 : 40 * 4);
              EXPECT_NEAR(sharded.clip_grad_norm(1), 2 * std::sqrt(72), 1e-5);
              optimizer.step();
              optimizer.zero_grad();
            }
            const auto local = sharded.named_local_parameters();
            sharded(at::ones({1, 8})).sum().backward();
            EXPECT_EQ(local[0].tensor.grad().scalar_type(),
                      keep ? at::kBFloat16 : at::kFloat);
            return state_of(sharded);
          };
          const auto kept = train(true), converted = train(false);
          for (const auto& [name, value] : kept) {
            EXPECT_EQ(value.scalar_type(), at::kFloat);
            EXPECT_TRUE(value.equal(converted.at(name))) << name;
          }
        },
        run);
  }
}

TEST(MixedPrecisionTest, InputsStayAsTheyAreOnRequest) {
  testing::run_ranks(1, [](ProcessGroups& groups) {
    ShardOptions options;
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.cast_forward_inputs = false;
    auto model = std::make_shared<Buffered>();
    auto sharded = fully_shard(model, groups, options).value();
    EXPECT_ANY_THROW(sharded(at::ones({4, 4})));  // fp32 times bf16.
    EXPECT_EQ(model->dtypes[0], at::kFloat);
  });
}

struct Scale : torch::nn::Module {
  explicit Scale(at::ScalarType dtype = at::kFloat)
      : weight(register_parameter("weight", at::ones({1}, dtype))) {}
  at::Tensor forward(at::Tensor x) { return (weight * x).sum(); }
  at::Tensor weight;
};

// bf16 cannot hold 259: only a sum in fp32 gives this mean.
TEST(MixedPrecisionTest, HalfGradientsReducedInFullPrecisionAreExact) {
  for (const char* backend : {"shm", "gloo"}) {
    testing::RunRanksOptions run;
    run.backend = backend;
    testing::run_ranks(
        4,
        [](ProcessGroups& groups) {
          ShardOptions options;
          options.mixed_precision.param_dtype = at::kBFloat16;
          options.mixed_precision.reduce_dtype = at::kFloat;
          auto sharded =
              fully_shard(std::make_shared<Scale>(), groups, options).value();
          sharded(at::full({1}, groups.rank() == 0 ? 256.f : 1.f)).backward();
          for (const LocalParameter& local : sharded.named_local_parameters()) {
            EXPECT_EQ(local.tensor.grad().item<float>(), 64.75f);
          }
        },
        run);
  }
}

TEST(MixedPrecisionTest, GradientIsTheMeanOnEveryPath) {
  for (const char* backend : {"shm", "gloo"}) {
    for (auto strategy :
         {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
          ShardingStrategy::kNoShard}) {
      testing::RunRanksOptions run;
      run.backend = backend;
      testing::run_ranks(
          2,
          [&](ProcessGroups& groups) {
            torch::nn::Linear linear(
                torch::nn::LinearOptions(4, 3).bias(false));
            ShardOptions options;
            options.strategy = strategy;
            auto sharded = fully_shard(linear, groups, options).value();
            // Rank r feeds r + 1 everywhere: the mean is 1.5 per row of input.
            sharded(at::full({5, 4}, groups.rank() + 1.f)).sum().backward();
            for (const LocalParameter& local :
                 sharded.named_local_parameters()) {
              EXPECT_TRUE(local.tensor.grad().equal(
                  at::full({local.tensor.numel()}, 5 * 1.5f)));
            }
          },
          run);
    }
  }
}

struct Mixed : torch::nn::Module {
  Mixed() {
    base = register_module("base", torch::nn::Linear(4, 4));
    adapter = register_module("adapter", torch::nn::Linear(4, 4));
    base->to(at::kBFloat16);
    for (auto& p : base->parameters()) p.set_requires_grad(false);
  }
  at::Tensor forward(at::Tensor x) {
    return base(x.to(at::kBFloat16)).to(at::kFloat) + adapter(x);
  }
  torch::nn::Linear base{nullptr}, adapter{nullptr};
};

TEST(MixedPrecisionTest, FrozenBf16BaseWithFp32AdapterTrainsLikeUnsharded) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    at::manual_seed(1);
    auto plain = std::make_shared<Mixed>();
    at::manual_seed(1);
    auto sharded = fully_shard(std::make_shared<Mixed>(), groups).value();
    for (int step = 0; step < 3; ++step) {
      plain->zero_grad();
      sharded.zero_grad();
      plain->forward(at::ones({2, 4})).pow(2).sum().backward();
      sharded(at::ones({2, 4})).pow(2).sum().backward();
      at::NoGradGuard no_grad;
      for (auto& p : plain->adapter->parameters()) p.sub_(p.grad(), 0.01);
      for (const LocalParameter& local : sharded.named_local_parameters()) {
        local.tensor.sub_(local.tensor.grad(), 0.01);
      }
    }
    auto state = state_of(sharded);
    for (auto& item : plain->named_parameters()) {
      EXPECT_EQ(state[item.key()].scalar_type(), item.value().scalar_type());
      EXPECT_TRUE(at::allclose(state[item.key()], item.value(), 1e-5, 1e-6))
          << item.key();
    }
  });
}

TEST(MixedPrecisionTest, CastsTensorsInsideNestedInputs) {
  std::tuple<at::Tensor, std::vector<at::Tensor>, std::map<int, at::Tensor>,
             int>
      value(at::ones({1}), {at::ones({1}, at::kLong)}, {{1, at::ones({1})}}, 3);
  cast_floating(value, at::kBFloat16);
  EXPECT_EQ(std::get<0>(value).scalar_type(), at::kBFloat16);
  EXPECT_EQ(std::get<1>(value)[0].scalar_type(), at::kLong);
  EXPECT_EQ(std::get<2>(value)[1].scalar_type(), at::kBFloat16);
}

struct Batch {
  at::Tensor image;
  std::vector<at::Tensor> masks;
};
template <class F>
void for_each_tensor(Batch& batch, F&& f) {
  f(batch.image);
  for (at::Tensor& mask : batch.masks) f(mask);
}

TEST(MixedPrecisionTest, CastsTensorsInsideAStruct) {
  std::vector<Batch> batches = {
      {at::ones({1}), {at::ones({1}), at::ones({1}, at::kBool)}}};
  cast_floating(batches, at::kHalf);
  EXPECT_EQ(batches[0].image.scalar_type(), at::kHalf);
  EXPECT_EQ(batches[0].masks[0].scalar_type(), at::kHalf);
  EXPECT_EQ(batches[0].masks[1].scalar_type(), at::kBool);
}

TEST(MixedPrecisionTest, RefusesADtypeThatIsNotFloating) {
  MixedPrecision policy;
  policy.reduce_dtype = at::kLong;
  EXPECT_EQ(validate(policy).message(),
            "mixed_precision.reduce_dtype: expected a floating dtype, got "
            "Long");
}

}  // namespace
}  // namespace fullshard
