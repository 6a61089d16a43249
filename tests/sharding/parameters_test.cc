// Parameters of every shape and kind, their state dict and loading it.

#include <map>

#include "ATen/ATen.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/utils.h"

namespace fullshard {
namespace {

using ::testing::HasSubstr;
using State = std::map<std::string, at::Tensor>;

State state_of(const ShardedModule& sharded) {
  State state;
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

struct Odd : torch::nn::Module {
  Odd() {
    at::manual_seed(1);
    scalar = register_parameter("scalar", at::randn({}));
    one = register_parameter("one", at::randn({1}));
    transposed = register_parameter("transposed", at::randn({4, 6}).t());
    conv = register_parameter(
        "conv",
        at::randn({3, 2, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
    empty = register_parameter("empty", at::zeros({0, 3}));
    bytes = register_parameter("bytes", at::arange(7, at::kByte), false);
    phase =
        register_parameter("phase", at::randn({3}, at::kComplexFloat), false);
    rotation = register_parameter("rotation",
                                  at::randn({3, 2}, at::kComplexFloat).t());
    unused = register_parameter("unused", at::randn({5}));
    stats = register_buffer("stats", at::ones({2}));
  }
  at::Tensor forward(at::Tensor x) {
    return (x.matmul(transposed.t()) * scalar + one).sum() + conv.pow(2).sum() +
           bytes.sum() + at::real(phase).sum() + empty.sum() +
           at::real(rotation * rotation * at::arange(3)).sum();
  }
  at::Tensor scalar, one, transposed, conv, empty, bytes, phase, rotation,
      unused, stats;
};

TEST(ParametersTest, EveryShapeAndKindTrainsLikeUnsharded) {
  for (int num_ranks : {1, 2, 3, 4, 8}) {
    testing::run_ranks(num_ranks, [](ProcessGroups& groups) {
      auto plain = std::make_shared<Odd>();
      auto sharded = fully_shard(std::make_shared<Odd>(), groups).value();
      EXPECT_EQ(sharded.module()->conv.strides(), plain->conv.strides());
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = at::ones({2, 4}) * (step + 1);
        plain->zero_grad();
        sharded.zero_grad();
        const at::Tensor expected = plain->forward(x);
        const at::Tensor loss = sharded(x);
        EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-4);
        expected.backward();
        loss.backward();
        at::NoGradGuard no_grad;  // Plain SGD on both.
        for (auto& p : plain->parameters()) {
          if (p.grad().defined()) p.sub_(p.grad(), 0.01);
        }
        for (const LocalParameter& local : sharded.named_local_parameters()) {
          local.tensor.sub_(local.tensor.grad(), 0.01);
        }
      }
      const State state = state_of(sharded);
      for (auto& item : plain->named_parameters()) {
        EXPECT_TRUE(
            at::allclose(state.at(item.key()), item.value(), 1e-5, 1e-6))
            << item.key();
        EXPECT_EQ(state.at(item.key()).scalar_type(),
                  item.value().scalar_type());
      }
      EXPECT_EQ(state.size(), 10u);
    });
  }
}

TEST(ParametersTest, StateDictNamesAreThoseOfTheModule) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<Odd>(), groups).value();
    EXPECT_THAT(sharded.state_dict_names(),
                ::testing::ElementsAre("scalar", "one", "transposed", "conv",
                                       "empty", "bytes", "phase", "rotation",
                                       "unused", "stats"));
  });
}

// The same tensor registered in two units: one parameter, moved to the unit
// that encloses both, with both names in the state dict.
struct TiedAcross : torch::nn::Module {
  TiedAcross() {
    at::manual_seed(1);
    embed = register_module("embed", torch::nn::Embedding(5, 4));
    head = register_module("head", std::make_shared<Output>(embed->weight));
  }
  struct Output : torch::nn::Module {
    explicit Output(at::Tensor shared)
        : weight(register_parameter("weight", std::move(shared))) {}
    at::Tensor forward(const at::Tensor& x) { return torch::linear(x, weight); }
    at::Tensor weight;
  };
  at::Tensor forward(at::Tensor ids) {
    return head->forward(embed(ids)).sin().sum();
  }
  torch::nn::Embedding embed{nullptr};
  std::shared_ptr<Output> head;
};

void train_tied(ProcessGroups& groups, const ShardOptions& options) {
  auto plain = std::make_shared<TiedAcross>();
  auto sharded =
      fully_shard(std::make_shared<TiedAcross>(), groups, options).value();
  const at::Tensor ids = at::tensor({0, 3, 3, 1}, at::kLong);
  for (int step = 0; step < 3; ++step) {
    plain->zero_grad();
    sharded.zero_grad();
    plain->forward(ids).backward();
    sharded(ids).backward();
    at::NoGradGuard no_grad;
    plain->embed->weight.sub_(plain->embed->weight.grad(), 0.1);
    for (const LocalParameter& local : sharded.named_local_parameters()) {
      local.tensor.sub_(local.tensor.grad(), 0.1);
    }
  }
  const State state = state_of(sharded);
  EXPECT_TRUE(at::allclose(state.at("embed.weight"), plain->embed->weight));
  EXPECT_TRUE(state.at("head.weight").equal(state.at("embed.weight")));
}

TEST(ParametersTest, TiedInsideAUnitStaysTied) {
  for (int num_ranks : {2, 4}) {
    testing::run_ranks(num_ranks,
                       [](ProcessGroups& groups) { train_tied(groups, {}); });
  }
}

TEST(ParametersTest, EachTiedNameIsInTheStateDict) {
  testing::run_ranks(1, [](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<TiedAcross>(), groups).value();
    EXPECT_THAT(sharded.state_dict_names(),
                ::testing::ElementsAre("embed.weight", "head.weight"));
    EXPECT_EQ(sharded.named_local_parameters().size(), 1u);
  });
}

TEST(ParametersTest, TiedAcrossUnitsIsHoistedAndStaysTied) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    ShardOptions options;
    options.wrap_policy = any_of({module_type<torch::nn::EmbeddingImpl>(),
                                  module_type<TiedAcross::Output>()});
    train_tied(groups, options);
  });
}

TEST(ParametersTest, LoadsWhatItSavedAtAnyNumberOfRanks) {
  for (int num_ranks : {1, 2, 3, 4, 8}) {
    testing::run_ranks(num_ranks, [](ProcessGroups& groups) {
      auto sharded = fully_shard(std::make_shared<Odd>(), groups).value();
      State state = state_of(sharded);
      for (auto& [name, tensor] : state) {
        if (tensor.is_floating_point()) tensor.add_(1);
      }
      ASSERT_TRUE(
          sharded
              .load_full_state_dict(
                  [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
                    return state.at(name);
                  })
              .ok());
      for (const auto& [name, tensor] : state_of(sharded)) {
        EXPECT_TRUE(tensor.equal(state.at(name))) << name;
      }
    });
  }
}

TEST(ParametersTest, LoadNamesAMissingKeyAndAWrongShape) {
  testing::run_ranks(1, [](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<Odd>(), groups).value();
    EXPECT_THAT(
        std::string(
            sharded
                .load_full_state_dict(
                    [](const std::string& name) -> absl::StatusOr<at::Tensor> {
                      return absl::NotFoundError("no key " + name);
                    })
                .message()),
        HasSubstr("no key scalar"));
    EXPECT_THAT(
        std::string(
            sharded
                .load_full_state_dict(
                    [](const std::string&) -> absl::StatusOr<at::Tensor> {
                      return at::zeros({2, 9});
                    })
                .message()),
        HasSubstr("parameter 'scalar': expected shape [], got [2, 9]"));
  });
}

// Trainable parameters of two dtypes in one unit: each keeps its own.
struct TwoDtypes : torch::nn::Module {
  TwoDtypes() {
    at::manual_seed(1);
    half = register_parameter("half", at::randn({3, 4}).to(at::kBFloat16));
    full = register_parameter("full", at::randn({4}));
  }
  at::Tensor forward(at::Tensor x) {
    return (half.to(at::kFloat) * full * x).sum();
  }
  at::Tensor half, full;
};

TEST(ParametersTest, TrainableParametersOfTwoDtypesInOneUnit) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    TwoDtypes plain;
    auto sharded = fully_shard(std::make_shared<TwoDtypes>(), groups).value();
    const at::Tensor x = at::arange(12, at::kFloat).view({3, 4});
    plain.forward(x).backward();
    sharded(x).backward();
    at::NoGradGuard no_grad;
    for (auto& p : plain.parameters()) p.sub_(p.grad(), 0.125);
    for (const LocalParameter& local : sharded.named_local_parameters()) {
      local.tensor.sub_(local.tensor.grad(), 0.125);
    }
    const State state = state_of(sharded);
    EXPECT_TRUE(state.at("half").equal(plain.half));
    EXPECT_TRUE(at::allclose(state.at("full"), plain.full));
  });
}

TEST(ParametersTest, UnitsCanBeInspected) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    torch::nn::Linear linear(5, 3);
    auto sharded = fully_shard(linear, groups).value();
    const std::vector<UnitInfo> units = sharded.units();
    ASSERT_EQ(units.size(), 1u);
    EXPECT_EQ(units[0].name, "root");
    EXPECT_THAT(units[0].parameters, ::testing::ElementsAre("weight", "bias"));
    EXPECT_EQ(units[0].numel, 18);
    EXPECT_EQ(units[0].unsharded_bytes, 24 * 4);
    EXPECT_EQ(units[0].sharded_bytes, 12 * 4);
  });
}

}  // namespace
}  // namespace fullshard
