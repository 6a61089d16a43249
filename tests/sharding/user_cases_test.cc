// Cases that hurt users of other implementations, each with its right value.

#include <algorithm>
#include <set>

#include "fullshard/activation_ckpt/checkpoint.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/counting_backend.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "torch/csrc/autograd/forward_grad.h"

namespace fullshard {
namespace {

using testing::CountingBackend;
using ::testing::ElementsAre;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::sgd;
using testing::State;
using testing::state_of;
using torch::nn::Linear;
using torch::nn::LinearOptions;

// Gathers and reductions of a rank, in order.
struct OrderBackend : CountingBackend {
  using CountingBackend::CountingBackend;

  static std::string unit() {
    const std::string scope = CollectiveScope::describe();
    return scope.substr(scope.rfind(' ') + 1);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    if (!unit().empty()) gathered.push_back(unit());
    return CountingBackend::_allgather_base(output, input, options);
  }

  std::vector<std::string> gathered;
};

struct Counted {
  explicit Counted(const ProcessGroups& real)
      : backend(c10::make_intrusive<OrderBackend>(real.world())),
        groups(real.env(), "shm", real.device(), backend, backend,
               real.replicate_group()) {}
  c10::intrusive_ptr<OrderBackend> backend;
  ProcessGroups groups;
};

// --- activation checkpointing and units inside each other

enum class Where { kInsideTheUnit, kAroundTheUnit, kUnitsOnInnerLinears };

struct Block : torch::nn::Module {
  Block() {
    up = register_module("up", Linear(LinearOptions(5, 7)));
    down = register_module("down", Linear(LinearOptions(7, 5)));
  }
  at::Tensor run(const at::Tensor& x) { return down(at::gelu(up(x))); }
  at::Tensor forward(const at::Tensor& x) {
    if (!checkpoints_itself) return run(x);
    return checkpoint([this](const at::Tensor& y) { return run(y); }, x);
  }
  bool checkpoints_itself = false;
  Linear up{nullptr}, down{nullptr};
};

struct Chain : torch::nn::Module {
  Chain() {
    at::manual_seed(3);
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(
          register_module("b" + std::to_string(i), std::make_shared<Block>()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) {
      x = checkpoints_blocks
              ? checkpoint(
                    [block](const at::Tensor& y) { return block->forward(y); },
                    x)
              : block->forward(x);
    }
    return x;
  }
  bool checkpoints_blocks = false;
  std::vector<std::shared_ptr<Block>> blocks;
};

State gradients_of(torch::nn::Module& plain) {
  State gradients;
  for (auto& item : plain.named_parameters()) {
    gradients[item.key()] = item.value().grad();
  }
  return gradients;
}

State gradients_of(ShardedModule& sharded) {
  State gradients;
  SummonOptions options;
  options.writeback = false;
  options.with_gradients = true;
  EXPECT_TRUE(
      sharded
          .summon_full_params(options,
                              [&](std::vector<FullParameter>& parameters) {
                                for (auto& p : parameters) {
                                  gradients[p.name] = p.gradient;
                                }
                                return absl::OkStatus();
                              })
          .ok());
  return gradients;
}

void expect_checkpoint_case(ProcessGroups& real, Where where,
                            int num_forwards) {
  Counted counted(real);
  auto model = std::make_shared<Chain>();
  ShardOptions options;
  options.wrap_policy = where == Where::kUnitsOnInnerLinears
                            ? module_type<torch::nn::LinearImpl>()
                            : module_type<Block>();
  model->checkpoints_blocks = where == Where::kAroundTheUnit;
  for (auto& block : model->blocks) {
    block->checkpoints_itself = where != Where::kAroundTheUnit;
  }
  auto sharded = fully_shard(model, counted.groups, options).value();
  Chain plain;
  const auto input = [&](int forward) {
    return at::arange(10, at::kFloat).view({2, 5}).cos() * (forward + 1);
  };
  for (int step = 0; step < 3; ++step) {
    sharded.zero_grad(), plain.zero_grad();
    counted.backend->gathered.clear();
    at::Tensor loss = at::zeros({}), expected = at::zeros({});
    for (int f = 0; f < num_forwards; ++f) {
      loss = loss + sharded(input(f)).pow(2).sum();
      expected = expected + plain.forward(input(f)).pow(2).sum();
    }
    loss.backward(), expected.backward();
    std::map<std::string, int> gathers;
    for (const std::string& unit : counted.backend->gathered) ++gathers[unit];
    for (const auto& [unit, count] : gathers) {
      EXPECT_LE(count, 2 * num_forwards)
          << unit << " in step " << step << " of case "
          << static_cast<int>(where);
    }
    expect_equal(gradients_of(sharded), gradients_of(plain));
  }
}

TEST(UserCasesTest, CheckpointsInsideAndAroundUnits) {
  run_ranks(2, [](ProcessGroups& groups) {
    for (Where where : {Where::kInsideTheUnit, Where::kAroundTheUnit,
                        Where::kUnitsOnInnerLinears}) {
      for (int num_forwards : {1, 2}) {
        expect_checkpoint_case(groups, where, num_forwards);
      }
    }
  });
}

// --- order of gathers

// The decoder's layers read what the encoder's last one wrote, and both use a
// scale of the root's own.
struct EncoderDecoder : torch::nn::Module {
  EncoderDecoder() {
    at::manual_seed(4);
    for (const char* name : {"enc0", "enc1", "dec0", "dec1"}) {
      layers.push_back(
          register_module(name, Linear(LinearOptions(4, 4).bias(false))));
    }
    scale = register_parameter("scale", at::ones({4}));
  }
  at::Tensor forward(const at::Tensor& source, const at::Tensor& target) {
    const at::Tensor memory = layers[1](at::tanh(layers[0](source * scale)));
    at::Tensor x = layers[2](target * scale) + memory;
    x = layers[3](at::tanh(x)) * memory;
    return x * scale;
  }
  std::vector<Linear> layers;
  at::Tensor scale;
};

TEST(UserCasesTest, EncoderDecoderWithRootParameters) {
  run_ranks(2, [](ProcessGroups& real) {
    Counted counted(real);
    ShardOptions options;
    options.wrap_policy = module_type<torch::nn::LinearImpl>();
    auto sharded =
        fully_shard(std::make_shared<EncoderDecoder>(), counted.groups, options)
            .value();
    EncoderDecoder plain;
    const at::Tensor source = at::ones({2, 4}), target = at::ones({2, 4}) * 2;
    for (int step = 0; step < 3; ++step) {
      sharded.zero_grad(), plain.zero_grad();
      const at::Tensor loss = sharded(source, target).sum();
      EXPECT_THAT(counted.backend->gathered,
                  ElementsAre("root", "enc0", "enc1", "dec0", "dec1"));
      counted.backend->gathered.clear();
      loss.backward();
      // dec1 and the root stayed from forward.
      EXPECT_THAT(counted.backend->gathered,
                  ElementsAre("dec0", "enc1", "enc0"));
      plain.forward(source, target).sum().backward();
      expect_equal(gradients_of(sharded), gradients_of(plain));
      counted.backend->gathered.clear();
    }
  });
}

// --- forward-mode automatic differentiation

TEST(UserCasesTest, TangentsOfInputs) {
  for (const char* backend : {"shm", "gloo"}) {
    RunRanksOptions run;
    run.backend = backend;
    run_ranks(
        2,
        [](ProcessGroups& groups) {
          using torch::autograd::ForwardADLevel;
          auto sharded = testing::shard_mlp(groups);
          testing::Mlp plain;
          const uint64_t level = ForwardADLevel::get_next_idx();
          const at::Tensor x = at::_make_dual(
              testing::batch(0), at::ones({2, 5}), static_cast<int64_t>(level));
          const auto [got, got_tangent] =
              at::_unpack_dual(sharded(x), static_cast<int64_t>(level));
          const auto [value, tangent] =
              at::_unpack_dual(plain.forward(x), static_cast<int64_t>(level));
          EXPECT_TRUE(at::allclose(got, value, 1e-5, 1e-6));
          ASSERT_TRUE(got_tangent.defined());
          EXPECT_TRUE(at::allclose(got_tangent, tangent, 1e-5, 1e-6));
          ForwardADLevel::release_idx(level);
        },
        run);
  }
}

// --- clipping

// A root that every rank keeps whole, and a child that is sharded.
struct Halves : torch::nn::Module {
  struct Child : torch::nn::Module {
    at::Tensor w = register_parameter("w", at::zeros({2}));
  };
  at::Tensor forward(const at::Tensor& x) {
    return (whole * x.narrow(0, 0, 1)).sum() +
           (child->w * x.narrow(0, 1, 2)).sum();
  }
  at::Tensor whole = register_parameter("whole", at::zeros({1}));
  std::shared_ptr<Child> child =
      register_module("child", std::make_shared<Child>());
};

TEST(UserCasesTest, NormOfAWholeRootAndAShardedChild) {
  run_ranks(2, [](ProcessGroups& groups) {
    ShardOptions options;
    options.ignored = [](const std::string& name) { return name == "whole"; };
    auto sharded =
        fully_shard(std::make_shared<Halves>(), groups, options).value();
    sharded(at::tensor({3.f, 4.f, 12.f})).backward();
    EXPECT_NEAR(sharded.clip_grad_norm(6.5), 13, 1e-5);
    const double scale = 6.5 / (13 + 1e-6);
    EXPECT_NEAR(sharded.module()->whole.grad()[0].item<float>(), 3 * scale,
                1e-5);
    EXPECT_NEAR(sharded.clip_grad_norm(6.5), 6.5, 1e-5);
  });
}

// --- frozen units

struct Alternating : torch::nn::Module {
  Alternating() {
    at::manual_seed(5);
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("l" + std::to_string(i),
                                       Linear(LinearOptions(5, 5))));
      for (auto& p : layers.back()->parameters()) {
        p.set_requires_grad(i % 2 == 1);
      }
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = at::tanh(layer(x));
    return x;
  }
  std::vector<Linear> layers;
};

TEST(UserCasesTest, AlternatingFrozenAndTrainable) {
  for (const char* backend : {"shm", "gloo"}) {
    RunRanksOptions run;
    run.backend = backend;
    run_ranks(
        2,
        [](ProcessGroups& groups) {
          ShardOptions options;
          options.wrap_policy = module_type<torch::nn::LinearImpl>();
          auto sharded =
              fully_shard(std::make_shared<Alternating>(), groups, options)
                  .value();
          Alternating plain;
          for (bool inputs_need_gradients : {false, true, false}) {
            for (int step = 0; step < 2; ++step) {
              sharded.zero_grad(), plain.zero_grad();
              at::Tensor x = at::ones({2, 5}), y = at::ones({2, 5});
              x.set_requires_grad(inputs_need_gradients);
              y.set_requires_grad(inputs_need_gradients);
              sharded(x).sum().backward();
              plain.forward(y).sum().backward();
              if (inputs_need_gradients) {
                EXPECT_TRUE(at::allclose(x.grad(), y.grad(), 1e-5, 1e-6));
              }
              for (const UnitInfo& unit : sharded.units()) {
                EXPECT_FALSE(unit.unsharded) << unit.name;
              }
              sgd(sharded), sgd(plain);
            }
          }
          expect_equal(state_of(sharded), state_of(plain));
        },
        run);
  }
}

// --- state

struct Shapes : torch::nn::Module {
  Shapes() {
    at::manual_seed(6);
    register_parameter("a", at::randn({17, 17}));
    register_parameter("b", at::randn({1, 17}));
    register_parameter("c", at::randn({5}));
    register_parameter("d", at::randn({3, 2, 2}));
  }
};

TEST(UserCasesTest, ShardingAndGatheringIsTheIdentity) {
  for (int ranks : {2, 3, 4, 8}) {
    run_ranks(ranks, [](ProcessGroups& groups) {
      Shapes plain;
      expect_equal(
          state_of(fully_shard(std::make_shared<Shapes>(), groups).value()),
          state_of(plain), 0, 0);
    });
  }
}

TEST(UserCasesTest, ALoadSaysWhatIsWrong) {
  run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<Shapes>(), groups).value();
    const State before = state_of(sharded);
    const auto load = [&](const std::string& name, const at::Tensor& instead,
                          LoadOptions options = {}) {
      State state = before;
      if (instead.defined()) {
        state[name] = instead;
      } else {
        state.erase(name);
      }
      return sharded.load_full_state_dict(
          [&](const std::string& key) -> absl::StatusOr<at::Tensor> {
            const auto found = state.find(key);
            if (found == state.end()) {
              return absl::NotFoundError("missing key '" + key + "'");
            }
            return found->second;
          },
          options);
    };
    EXPECT_EQ(load("c", {}).message(), "missing key 'c'");
    EXPECT_EQ(load("c", at::ones({6})).message(),
              "parameter 'c': expected shape [5], got [6]");
    EXPECT_EQ(load("c", at::ones({5}, at::kHalf)).message(),
              "parameter 'c': expected dtype Float, got Half; set "
              "LoadOptions::cast_dtypes to convert it");
    LoadOptions cast;
    cast.cast_dtypes = true;
    EXPECT_TRUE(load("c", at::ones({5}, at::kHalf), cast).ok());
    EXPECT_TRUE(state_of(sharded).at("c").equal(at::ones({5})));
  });
}

// What a user's function throws on one rank ends the call on all of them.
TEST(UserCasesTest, AnExceptionOfASourceOrSinkReachesAll) {
  run_ranks(2, [&](ProcessGroups& groups) {
    auto sharded = fully_shard(std::make_shared<Shapes>(), groups).value();
    const auto expect_fails = [&](const absl::Status& status, int failing) {
      EXPECT_THAT(std::string(status.message()),
                  groups.rank() == failing
                      ? HasSubstr("disk on fire")
                      : HasSubstr("failed on another rank"));
    };
    for (int failing : {0, 1}) {
      const bool fails = groups.rank() == failing;
      std::map<std::string, at::Tensor> state;
      expect_fails(sharded.full_state_dict(
                       [&](const std::string& name, const at::Tensor& tensor) {
                         if (fails) throw std::runtime_error("disk on fire");
                         state[name] = tensor.clone();
                         return absl::OkStatus();
                       },
                       /*all_ranks=*/true),
                   failing);
      ASSERT_TRUE(sharded
                      .full_state_dict(
                          [&](const std::string& name, const at::Tensor& t) {
                            state[name] = t.clone();
                            return absl::OkStatus();
                          },
                          /*all_ranks=*/true)
                      .ok());
      // While the first look at everything, and while it is read.
      for (int call : {1, static_cast<int>(state.size()) + 1}) {
        int calls = 0;
        expect_fails(
            sharded.load_full_state_dict(
                [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
                  if (++calls == call && fails) {
                    throw std::runtime_error("disk on fire");
                  }
                  return state.at(name);
                }),
            failing);
      }
    }
  });
}

// Only rank 0 of a 2 x 2 mesh has the tensors.
TEST(UserCasesTest, AFullDictOfRank0LoadsOnEveryRank) {
  RunRanksOptions run;
  run.shard_group_size = 2;
  run_ranks(
      4,
      [](ProcessGroups& groups) {
        ShardOptions shard;
        shard.strategy = ShardingStrategy::kHybridShard;
        auto sharded =
            fully_shard(std::make_shared<testing::Mlp>(), groups, shard)
                .value();
        State wanted = state_of(sharded);
        for (auto& [name, tensor] : wanted) tensor = tensor + 2;
        LoadOptions options;
        options.from_rank0 = true;
        const absl::Status loaded = sharded.load_full_state_dict(
            [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
              EXPECT_EQ(groups.rank(), 0);
              return wanted.at(name);
            },
            options);
        EXPECT_TRUE(loaded.ok()) << loaded;
        expect_equal(state_of(sharded), wanted, 0, 0);
        // An error of rank 0 ends the call everywhere.
        const absl::Status failed = sharded.load_full_state_dict(
            [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
              if (name == "l1.bias") return absl::NotFoundError("no l1.bias");
              return wanted.at(name);
            },
            options);
        EXPECT_EQ(failed.code(), groups.rank() == 0
                                     ? absl::StatusCode::kNotFound
                                     : absl::StatusCode::kAborted);
      },
      run);
}

}  // namespace
}  // namespace fullshard
