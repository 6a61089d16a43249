// How a model is divided into units, and what each may have of its own. In a
// world of one, and as one rank of a larger one that does not exist.

#include "fullshard/sharding/sharded_state.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/rnn.h"

namespace fullshard {
namespace {

using testing::batch;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::layer_units;
using testing::Mlp;
using testing::run_ranks;
using testing::sgd;
using testing::shard_mlp;

std::vector<std::string> unit_names(const ShardedModule& sharded) {
  std::vector<std::string> names;
  for (const UnitInfo& unit : sharded.units()) names.push_back(unit.name);
  return names;
}

// 30 elements a layer; towers of two and of one; a list around them.
struct Towers : torch::nn::Module {
  Towers() {
    using torch::nn::Linear, torch::nn::LinearOptions;
    const auto tower = [](int layers) {
      auto module = std::make_shared<torch::nn::Module>();
      for (int i = 0; i < layers; ++i) {
        module->register_module("l" + std::to_string(i),
                                Linear(LinearOptions(5, 5)));
      }
      return module;
    };
    torch::nn::ModuleList list;
    list->push_back(tower(2));
    list->push_back(tower(1));
    register_module("towers", list);
    register_module("head", Linear(LinearOptions(5, 5)));
  }
};

TEST(UnitsTest, BySize) {
  run_ranks(1, [](ProcessGroups& groups) {
    const auto names = [&](const WrapPolicy& policy) {
      ShardOptions options;
      options.wrap_policy = policy;
      return unit_names(
          fully_shard(std::make_shared<Towers>(), groups, options).value());
    };
    EXPECT_THAT(names(at_least_numel(60)), ElementsAre("root", "towers.0"));
    EXPECT_THAT(
        names(at_least_numel(30)),
        ElementsAre("towers.0.l0", "towers.0.l1", "towers.1.l0", "head"));
    // What another policy takes does not count for size.
    EXPECT_THAT(
        names(any_of({at_least_numel(30), module_if([](const std::string& name,
                                                       torch::nn::Module&) {
                        return name == "towers.1.l0";
                      })})),
        ElementsAre("towers.0.l0", "towers.0.l1", "towers.1.l0", "head"));
    EXPECT_THAT(
        names(any_of({at_least_numel(60), module_if([](const std::string& name,
                                                       torch::nn::Module&) {
                        return name == "towers.0.l0";
                      })})),
        ElementsAre("root", "towers.0.l0"));
  });
}

TEST(UnitsTest, NothingIsLargeEnough) {
  run_ranks(1, [](ProcessGroups& groups) {
    ShardOptions options;
    options.wrap_policy = at_least_numel(1000);
    const auto sharded =
        fully_shard(std::make_shared<Towers>(), groups, options);
    EXPECT_THAT(std::string(sharded.status().message()),
                HasSubstr("wrap_policy (at least 1000 elements) matches no "
                          "module; the model has modules of types"));
  });
}

// One unit in double, one that stays unsharded, one reduced in bf16.
ShardOptions mixed_units() {
  ShardOptions options = layer_units();
  options.unit_options = [](const std::string& name, const torch::nn::Module&,
                            UnitOptions& own) {
    if (name == "l1") own.reshard_after_forward = false;
    if (name == "l2") own.reduce_dtype = at::kDouble;
  };
  return options;
}

TEST(UnitsTest, OptionsOfOneUnit) {
  for (const char* backend : {"shm", "gloo"}) {
    testing::RunRanksOptions run;
    run.backend = backend;
    run_ranks(
        2,
        [](ProcessGroups& groups) {
          auto sharded = shard_mlp(groups, mixed_units());
          for (const auto& unit : sharded.state()->units()) {
            EXPECT_EQ(unit->reshard_after_forward, unit->name != "l1");
            EXPECT_EQ(unit->reduce_dtype,
                      unit->name == "l2" ? at::kDouble : at::kFloat);
          }
          testing::expect_trains_like_one_process(groups, mixed_units());
        },
        run);
  }
}

TEST(UnitsTest, ParamDtypeOfOneUnit) {
  run_ranks(2, [](ProcessGroups& groups) {
    ShardOptions options = layer_units();
    options.unit_options = [](const std::string& name, const torch::nn::Module&,
                              UnitOptions& own) {
      if (name == "l1") own.param_dtype = at::kBFloat16;
    };
    auto sharded = shard_mlp(groups, options);
    for (const auto& unit : sharded.state()->units()) {
      const at::ScalarType expected =
          unit->name == "l1" ? at::kBFloat16 : at::kFloat;
      EXPECT_EQ(unit->reduce_dtype, expected) << unit->name;
      for (const auto& flat : unit->flats) {
        EXPECT_EQ(flat->placement().compute_dtype, expected) << unit->name;
        EXPECT_EQ(flat->storage_dtype(), at::kFloat) << unit->name;
      }
    }
  });
}

// A model in fp32 but for some modules in bf16, one of which uses views of its
// parameters, and a BatchNorm.
struct Mixed : torch::nn::Module {
  Mixed() {
    at::manual_seed(2);
    first = register_module("first", torch::nn::Linear(8, 8));
    attention = register_module(
        "attention", torch::nn::MultiheadAttention(
                         torch::nn::MultiheadAttentionOptions(8, 2)));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    lstm =
        register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(8, 8)));
    last = register_module("last", torch::nn::Linear(8, 3));
  }
  static at::Tensor to(const at::Tensor& x, at::ScalarType dtype,
                       bool by_hand) {
    return by_hand ? x.to(dtype) : x;
  }
  at::Tensor forward(at::Tensor x, bool by_hand) {
    x = at::tanh(first(x));
    x = to(x, at::kBFloat16, by_hand);
    x = std::get<0>(attention(x, x, x));
    dtypes = {x.scalar_type()};
    x = norm(to(x, at::kFloat, by_hand).reshape({-1, 8})).view({3, 2, 8});
    dtypes.push_back(x.scalar_type());
    x = std::get<0>(lstm(to(x, at::kBFloat16, by_hand)));
    dtypes.push_back(x.scalar_type());
    // A view of a parameter, by hand.
    return to(x, at::kFloat, by_hand).matmul(last->weight.t()) + last->bias;
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  std::vector<at::ScalarType> dtypes;
};

TEST(UnitsTest, InputsAreCastWhereUnitsDifferInDtype) {
  for (int ranks : {1, 2}) {
    run_ranks(ranks, [](ProcessGroups& groups) {
      ShardOptions options;
      options.wrap_policy =
          any_of({module_type<torch::nn::LinearImpl>(),
                  module_type<torch::nn::MultiheadAttentionImpl>(),
                  module_type<torch::nn::LSTMImpl>()});
      options.unit_options = [](const std::string& name,
                                const torch::nn::Module&, UnitOptions& own) {
        if (name.rfind("attention", 0) == 0 || name == "lstm") {
          own.param_dtype = at::kBFloat16;
          own.reduce_dtype = at::kFloat;
        }
      };
      const at::Tensor x = at::arange(48, at::kFloat).view({3, 2, 8}).sin();
      auto sharded =
          fully_shard(std::make_shared<Mixed>(), groups, options).value();
      auto plain = std::make_shared<Mixed>();
      for (int step = 0; step < 3; ++step) {
        const at::Tensor y = sharded(x, false);
        EXPECT_EQ(y.scalar_type(), at::kFloat);
        EXPECT_EQ(sharded->dtypes,
                  (std::vector<at::ScalarType>{at::kBFloat16, at::kFloat,
                                               at::kBFloat16}));
        y.pow(2).sum().backward();
        // The same casts by hand, of a copy of the masters.
        auto half = std::make_shared<Mixed>();
        {
          at::NoGradGuard no_grad;
          for (auto& item : half->named_parameters()) {
            item.value().copy_(plain->named_parameters()[item.key()]);
          }
          half->norm->running_mean.copy_(plain->norm->running_mean);
          half->norm->running_var.copy_(plain->norm->running_var);
        }
        half->attention->to(at::kBFloat16);
        half->lstm->to(at::kBFloat16);
        const at::Tensor expected = half->forward(x, true);
        EXPECT_TRUE(y.equal(expected)) << step;
        expected.pow(2).sum().backward();
        at::NoGradGuard no_grad;
        plain->norm->running_mean.copy_(half->norm->running_mean);
        plain->norm->running_var.copy_(half->norm->running_var);
        for (auto& item : plain->named_parameters()) {
          item.value().sub_(
              half->named_parameters()[item.key()].grad().to(at::kFloat), 0.1);
        }
        for (const LocalParameter& local : sharded.named_local_parameters()) {
          at::Tensor(local.tensor).detach().sub_(local.tensor.grad(), 0.1);
        }
        sharded.zero_grad();
        sharded.reshard();
      }
      for (const auto& [name, tensor] : testing::state_of(sharded)) {
        if (!at::isFloatingType(tensor.scalar_type())) continue;
        const at::Tensor* parameter = plain->named_parameters().find(name);
        const at::Tensor* buffer = plain->named_buffers().find(name);
        EXPECT_TRUE(at::allclose(
            tensor, parameter != nullptr ? *parameter : *buffer, 1e-5, 1e-6))
            << name;
      }
      // Without the casts LibTorch refuses.
      options.mixed_precision.cast_forward_inputs = false;
      auto uncast =
          fully_shard(std::make_shared<Mixed>(), groups, options).value();
      EXPECT_THROW(uncast(x, false), c10::Error);
      EXPECT_NO_THROW(uncast(x, true));
    });
  }
}

TEST(UnitsTest, WrongOptionsNameTheUnit) {
  run_ranks(1, [](ProcessGroups& groups) {
    ShardOptions options = layer_units();
    options.unit_options = [](const std::string& name, const torch::nn::Module&,
                              UnitOptions& own) {
      if (name == "l1") own.reduce_dtype = at::kLong;
    };
    const auto sharded = fully_shard(std::make_shared<Mlp>(), groups, options);
    EXPECT_THAT(std::string(sharded.status().message()),
                HasSubstr("unit 'l1': "));
  });
}

// Rank 5 of 1,024, of which there is only this one.
TEST(UnitsTest, OneRankOfALargeWorld) {
  testing::expect_success(testing::collect_processes(1, [](const LaunchEnv&) {
    LaunchEnv env;
    env.world_size = env.local_world_size = 8;
    env.rank = env.local_rank = 5;
    ProcessGroupsOptions group_options;
    group_options.backend = "fake";
    ProcessGroups groups = init_process_groups(env, group_options).value();
    auto sharded = shard_mlp(groups);
    for (int step = 0; step < 3; ++step) {
      sharded(batch(0)).sum().backward();
      sharded.clip_grad_norm(1);
      sgd(sharded);
      sharded.zero_grad();
    }
    for (const UnitInfo& unit : sharded.units()) {
      const bool layer = unit.name != "root";
      // 25 + 5 elements from offsets 0 and 28: 33, in 8 chunks of 8.
      EXPECT_EQ(unit.numel, layer ? 30 : 5);
      EXPECT_EQ(unit.sharded_bytes, layer ? 8 * 4 : 4 * 4);
      EXPECT_EQ(unit.unsharded_bytes, 8 * unit.sharded_bytes);
    }
  }));
}

}  // namespace
}  // namespace fullshard
