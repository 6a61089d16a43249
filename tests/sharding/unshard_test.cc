// Unsharding by hand: units by name, full parameters, run-time toggles.

#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/counting_backend.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "torch/optim/sgd.h"

namespace fullshard {
namespace {

using testing::batch;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::layer_units;
using testing::Mlp;
using testing::plain_backward;
using testing::sgd;
using testing::shard_mlp;
using testing::state_of;

// On shared memory and on collectives, fp32 and bf16: the paths differ.
void run_all(const std::function<void(ProcessGroups&, ShardOptions)>& body) {
  for (const char* backend : {"shm", "gloo"}) {
    for (int num_ranks : {1, 2, 3}) {
      testing::RunRanksOptions run;
      run.backend = backend;
      testing::run_ranks(
          num_ranks,
          [&](ProcessGroups& groups) {
            for (bool bf16 : {false, true}) {
              SCOPED_TRACE(bf16);
              ShardOptions options = layer_units();
              if (bf16) {
                options.mixed_precision.param_dtype = at::kBFloat16;
                options.mixed_precision.buffer_dtype = at::kBFloat16;
                options.mixed_precision.reduce_dtype = at::kFloat;
              }
              body(groups, options);
            }
          },
          run);
    }
  }
}

bool is_unsharded(const ShardedModule& sharded, const std::string& name) {
  for (const UnitInfo& unit : sharded.units()) {
    if (unit.name == name) return unit.unsharded;
  }
  ADD_FAILURE() << "no unit " << name;
  return false;
}

void train_and_compare(FullyShardedModule<Mlp>& sharded, int rank,
                       int num_ranks, bool bf16) {
  Mlp plain;
  for (int step = 0; step < 2; ++step) {
    sharded.zero_grad(), plain.zero_grad();
    sharded(batch(rank)).sum().backward();
    plain_backward(plain, num_ranks);
    sgd(sharded), sgd(plain);
  }
  const double tolerance = bf16 ? 5e-2 : 1e-5;
  expect_equal(state_of(sharded), state_of(plain), tolerance, tolerance);
}

TEST(UnshardTest, ByNameBeforeTheFirstForward) {
  run_all([](ProcessGroups& groups, ShardOptions options) {
    auto sharded = shard_mlp(groups, options);
    auto handle = sharded.unshard({"l1", "root"}).value();
    handle.wait();
    EXPECT_TRUE(is_unsharded(sharded, "l1"));
    EXPECT_TRUE(is_unsharded(sharded, "root"));
    EXPECT_FALSE(is_unsharded(sharded, "l0"));
    // Stays, whatever else is used.
    EXPECT_TRUE(sharded.module()->layers[2]->weight.sum().defined());
    EXPECT_TRUE(is_unsharded(sharded, "l1"));
    EXPECT_TRUE(sharded.reshard({"l1"}).ok());
    EXPECT_FALSE(is_unsharded(sharded, "l1"));
    sharded.reshard();
    EXPECT_FALSE(is_unsharded(sharded, "root"));
    train_and_compare(sharded, groups.rank(), groups.world_size(),
                      options.mixed_precision.param_dtype.has_value());
  });
}

TEST(UnshardTest, AllAtOnceThenTrain) {
  run_all([](ProcessGroups& groups, ShardOptions options) {
    auto sharded = shard_mlp(groups, options);
    for (int i = 0; i < 2; ++i) sharded.unshard().value().wait();
    for (const UnitInfo& unit : sharded.units()) EXPECT_TRUE(unit.unsharded);
    train_and_compare(sharded, groups.rank(), groups.world_size(),
                      options.mixed_precision.param_dtype.has_value());
    for (const UnitInfo& unit : sharded.units()) EXPECT_FALSE(unit.unsharded);
  });
}

TEST(UnshardTest, UnknownUnitIsNamed) {
  testing::run_ranks(1, [](ProcessGroups& groups) {
    auto sharded = shard_mlp(groups);
    EXPECT_THAT(std::string(sharded.unshard({"l9"}).status().message()),
                HasSubstr("no unit 'l9', there are root, l0, l1, l2"));
    EXPECT_EQ(sharded.reshard({"x"}).code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(sharded.set_forward_prefetch("l0", {"x"}).code(),
              absl::StatusCode::kNotFound);
  });
}

TEST(UnshardTest, ExplicitPrefetchLists) {
  run_all([](ProcessGroups& groups, ShardOptions options) {
    options.prefetch = false;
    auto sharded = shard_mlp(groups, options);
    EXPECT_TRUE(sharded.set_forward_prefetch("l0", {"l1", "l2"}).ok());
    EXPECT_TRUE(sharded.set_backward_prefetch("l2", {"l1"}).ok());
    train_and_compare(sharded, groups.rank(), groups.world_size(),
                      options.mixed_precision.param_dtype.has_value());
  });
}

// --- toggles, counted where gathers communicate

struct Counted {
  explicit Counted(const ProcessGroups& real)
      : backend(c10::make_intrusive<testing::CountingBackend>(real.world())),
        groups(real.env(), "shm", real.device(), backend, backend,
               real.replicate_group()) {}
  int64_t gathers() {
    const int64_t total = backend->count("all_gather").num_calls;
    return total - std::exchange(before, total);
  }
  c10::intrusive_ptr<testing::CountingBackend> backend;
  ProcessGroups groups;
  int64_t before = 0;
};

TEST(UnshardTest, ReshardAfterForwardIsToggledAtRunTime) {
  testing::run_ranks(2, [](ProcessGroups& real) {
    Counted counted(real);
    auto sharded = shard_mlp(counted.groups);
    Mlp plain;
    const auto step = [&] {
      sharded.zero_grad(), plain.zero_grad();
      counted.gathers();
      sharded(batch(real.rank())).sum().backward();
      const int64_t gathers = counted.gathers();
      plain_backward(plain, 2);
      sgd(sharded), sgd(plain);
      return gathers;
    };
    // A first step also compares the order of the ranks, by a gather.
    const auto expect_steps = [&](int64_t gathers) {
      EXPECT_EQ(step(), gathers + 1);
      for (int i = 0; i < 2; ++i) EXPECT_EQ(step(), gathers);
    };
    expect_steps(4 + 2);
    EXPECT_TRUE(sharded.set_reshard_after_forward(false).ok());
    expect_steps(4);
    EXPECT_TRUE(sharded.set_reshard_after_forward(true, {"l0"}).ok());
    expect_steps(4 + 1);
    EXPECT_TRUE(sharded.set_reshard_after_forward(true).ok());
    expect_steps(4 + 2);
    expect_equal(state_of(sharded), state_of(plain));
  });
}

TEST(UnshardTest, ParametersKeptAcrossMicroBatches) {
  testing::run_ranks(2, [](ProcessGroups& real) {
    Counted counted(real);
    ShardOptions options = layer_units();
    options.strategy = ShardingStrategy::kShardGradOp;
    auto sharded = shard_mlp(counted.groups, options);
    ShardedAdamW optimizer(sharded, {});
    sharded.set_reshard_after_backward(false);
    for (int step = 0; step < 3; ++step) {
      for (int i = 0; i < 3; ++i) {
        counted.gathers();
        sharded(batch(real.rank(), i)).sum().backward();
        if (step == 0) continue;  // Also compares the order of the ranks.
        EXPECT_EQ(counted.gathers(), i == 0 ? 4 : 0) << step << " " << i;
      }
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

TEST(UnshardTest, KeptParametersTrainRight) {
  run_all([](ProcessGroups& groups, ShardOptions options) {
    auto sharded = shard_mlp(groups, options);
    sharded.set_reshard_after_backward(false);
    train_and_compare(sharded, groups.rank(), groups.world_size(),
                      options.mixed_precision.param_dtype.has_value());
  });
}

// --- stale copies: torch's SGD raises no version counter

TEST(UnshardTest, StepOfTorchsSgdWithoutABackward) {
  for (const char* backend : {"shm", "gloo"}) {
    testing::RunRanksOptions run;
    run.backend = backend;
    testing::run_ranks(
        2,
        [](ProcessGroups& groups) {
          auto sharded = shard_mlp(groups);
          Mlp plain;
          std::vector<at::Tensor> locals;
          for (auto& local : sharded.named_local_parameters()) {
            locals.push_back(local.tensor);
          }
          torch::optim::SGD ours(locals, 0.5), theirs(plain.parameters(), 0.5);
          sharded(batch(groups.rank())).sum().backward();
          plain_backward(plain, 2);
          for (int i = 0; i < 3; ++i) {
            // The root, with a parameter of its own, stays unsharded.
            sharded(batch(0));
            ours.step(), theirs.step();
            EXPECT_TRUE(
                at::allclose(sharded(batch(0)), plain.forward(batch(0))));
          }
          if (groups.backend() == "shm") return;
          for (int i = 0; i < 3; ++i) {  // By the module itself.
            sharded(batch(0));
            ours.step(), theirs.step();
            EXPECT_TRUE(at::allclose(sharded.module()->forward(batch(0)),
                                     plain.forward(batch(0))));
          }
        },
        run);
  }
}

// --- full parameters

TEST(SummonTest, EveryCombinationOfOptions) {
  run_all([](ProcessGroups& groups, ShardOptions options) {
    for (int bits = 0; bits < 16; ++bits) {
      SCOPED_TRACE(bits);
      auto sharded = shard_mlp(groups, options);
      Mlp plain;
      sharded(batch(groups.rank())).sum().backward();
      plain_backward(plain, groups.world_size());
      SummonOptions summon;
      summon.writeback = (bits & 1) != 0;
      summon.rank0_only = (bits & 2) != 0;
      summon.offload_to_cpu = (bits & 4) != 0;
      summon.with_gradients = (bits & 8) != 0;
      const auto expected = state_of(plain);
      const absl::Status status = sharded.summon_full_params(
          summon, [&](std::vector<FullParameter>& parameters) {
            const bool receives = !summon.rank0_only || groups.rank() == 0;
            EXPECT_EQ(parameters.size(), receives ? 7u : 0u);
            for (FullParameter& p : parameters) {
              EXPECT_TRUE(p.value.equal(expected.at(p.name))) << p.name;
              EXPECT_EQ(p.value.scalar_type(), at::kFloat);
              EXPECT_EQ(p.gradient.defined(), summon.with_gradients);
              if (p.gradient.defined()) {
                const bool bf16 =
                    options.mixed_precision.param_dtype == at::kBFloat16;
                EXPECT_TRUE(at::allclose(p.gradient, expected.at(p.name).grad(),
                                         bf16 ? 5e-2 : 1e-5,
                                         bf16 ? 5e-2 : 1e-6))
                    << p.name;
              }
              p.value.fill_(2);
            }
            return absl::OkStatus();
          });
      if (summon.writeback && summon.rank0_only) {
        EXPECT_THAT(std::string(status.message()), HasSubstr("exclude"));
      } else {
        EXPECT_TRUE(status.ok()) << status;
      }
      const bool survives = summon.writeback && !summon.rank0_only;
      for (const auto& [name, value] : state_of(sharded)) {
        if (name == "running") continue;
        EXPECT_TRUE(
            value.equal(survives ? at::full_like(value, 2) : expected.at(name)))
            << name;
      }
    }
  });
}

TEST(SummonTest, AnErrorOfTheBodyWritesNothing) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard_mlp(groups);
    const absl::Status status = sharded.summon_full_params(
        {}, [](std::vector<FullParameter>& parameters) {
          for (FullParameter& p : parameters) p.value.fill_(2);
          return absl::InternalError("no");
        });
    EXPECT_EQ(status.message(), "no");
    expect_equal(state_of(sharded), state_of(Mlp()));
  });
}

// --- what is not sharded

TEST(IgnoredTest, AreEqualOnAllRanksAndInTheState) {
  run_all([](ProcessGroups& groups, ShardOptions options) {
    options.sync_module_states = true;
    options.ignored = [](const std::string& name) {
      return name == "scale" || name.rfind("l1.", 0) == 0;
    };
    auto model = std::make_shared<Mlp>();
    {
      at::NoGradGuard no_grad;
      model->scale.add_(groups.rank());
    }
    auto sharded = fully_shard(model, groups, options).value();
    const bool bf16 = options.mixed_precision.param_dtype.has_value();
    if (bf16) return;  // The model mixes dtypes by hand then.
    Mlp plain;
    for (int step = 0; step < 2; ++step) {
      sharded.zero_grad(), plain.zero_grad();
      sharded(batch(groups.rank())).sum().backward();
      plain_backward(plain, groups.world_size());
      double squares = 0;
      for (auto& p : plain.parameters()) {
        squares += p.grad().pow(2).sum().item<double>();
      }
      const double max_norm = std::sqrt(squares) / 2;
      EXPECT_NEAR(sharded.clip_grad_norm(max_norm), std::sqrt(squares), 1e-4);
      for (auto& p : plain.parameters()) p.mutable_grad().div_(2);
      sgd(sharded), sgd(plain);
      at::NoGradGuard no_grad;
      for (at::Tensor p :
           {model->scale, model->layers[1]->weight, model->layers[1]->bias}) {
        p.sub_(p.grad(), 0.1);
      }
    }
    expect_equal(state_of(sharded), state_of(plain), 1e-4, 1e-5);
    EXPECT_EQ(sharded.named_local_parameters().empty(), false);
  });
}

TEST(MetaTest, MaterializesEachModuleOnce) {
  for (int num_ranks : {1, 2, 3}) {
    testing::run_ranks(num_ranks, [](ProcessGroups& groups) {
      auto model = testing::meta_mlp();
      std::map<std::string, int> calls;
      ShardOptions options = layer_units();
      EXPECT_THAT(
          std::string(fully_shard(model, groups, options).status().message()),
          HasSubstr("'scale' is on the meta device"));
      model = testing::meta_mlp();
      options.sync_module_states = true;
      options.materialize = [&](const std::string& name,
                                torch::nn::Module& module) {
        ++calls[name];
        for (auto& p : module.parameters(/*recurse=*/false)) {
          p.fill_(1 + groups.rank());  // Rank 0's wins.
        }
        for (auto& b : module.buffers(/*recurse=*/false)) b.fill_(5);
      };
      auto sharded = fully_shard(model, groups, options).value();
      EXPECT_EQ(calls, (std::map<std::string, int>{
                           {"", 1}, {"l0", 1}, {"l1", 1}, {"l2", 1}}));
      for (const auto& [name, value] : state_of(sharded)) {
        EXPECT_TRUE(
            value.equal(at::full_like(value, name == "running" ? 5 : 1)))
            << name;
      }
      Mlp plain;
      {
        at::NoGradGuard no_grad;
        for (auto& p : plain.parameters()) p.fill_(1);
        plain.running.fill_(5);
      }
      sharded(batch(groups.rank())).sum().backward();
      plain_backward(plain, groups.world_size());
      sgd(sharded), sgd(plain);
      expect_equal(state_of(sharded), state_of(plain));
    });
  }
}

}  // namespace
}  // namespace fullshard
