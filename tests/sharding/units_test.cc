// How a model is divided into units, and what each may have of its own. In a
// world of one, and as one rank of a larger one that does not exist.

#include "fullshard/sharding/sharded_state.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "torch/nn/modules/container/modulelist.h"

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
