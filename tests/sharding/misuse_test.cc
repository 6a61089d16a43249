// What users do with a module out of habit, after it was sharded: it is right,
// or an error that names the parameter or the call to use.

#include <functional>
#include <memory>
#include <sstream>

#include "ATen/ATen.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/nn/init.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/utils/clip_grad.h"
#include "torch/optim/sgd.h"
#include "torch/serialize.h"
#include "torch/utils.h"

namespace fullshard {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Mlp : torch::nn::Module {
  Mlp() {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(
          register_module("l" + std::to_string(i), torch::nn::Linear(6, 6)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = at::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

using Sharded = FullyShardedModule<Mlp>;

Sharded shard(ProcessGroups& groups,
              const std::function<void(Mlp&)>& before = nullptr) {
  at::manual_seed(2);
  auto model = std::make_shared<Mlp>();
  if (before) before(*model);
  ShardOptions options;
  options.wrap_policy = module_type<torch::nn::LinearImpl>();
  return fully_shard(model, groups, options).value();
}

at::Tensor input() { return at::ones({4, 6}); }

// Returns the norm of the gradient.
double good_step(const Sharded& sharded) {
  Sharded s = sharded;
  s.zero_grad();
  s(input()).sum().backward();
  const double norm = s.clip_grad_norm(1e9);
  EXPECT_GT(norm, 0);
  return norm;
}

// The message of what `f` throws; empty if nothing.
std::string message_of(const std::function<void()>& f) {
  try {
    f();
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

// `misuse`, then a step, must throw a message that says `expected`.
void expect_error(const std::function<void(Sharded&)>& misuse,
                  const std::string& expected,
                  const std::function<void(Mlp&)>& before = nullptr) {
  testing::run_ranks(1, [&](ProcessGroups& groups) {
    Sharded sharded = shard(groups, before);
    good_step(sharded);
    EXPECT_THAT(message_of([&] {
                  misuse(sharded);
                  sharded(input()).sum().backward();
                }),
                HasSubstr(expected));
  });
}

TEST(MisuseTest, InPlaceInitialisation) {
  expect_error(
      [](Sharded& s) { torch::nn::init::ones_(s.module()->layers[1]->weight); },
      "parameter 'l1.weight' was written in place");
}

TEST(MisuseTest, InPlaceOperatorUnderAutograd) {
  expect_error([](Sharded& s) { s.module()->layers[1]->weight.mul_(2); },
               "l1.weight");
}

TEST(MisuseTest, ModuleTo) {
  expect_error([](Sharded& s) { s.module()->to(at::kDouble); },
               "other storage or another dtype");
}

TEST(MisuseTest, SetData) {
  expect_error(
      [](Sharded& s) {
        s.module()->layers[1]->weight.set_data(at::ones({6, 6}));
      },
      "parameter 'l1.weight' was given other storage");
}

TEST(MisuseTest, UnfreezingAFrozenParameter) {
  expect_error(
      [](Sharded& s) { s.module()->layers[0]->weight.set_requires_grad(true); },
      "frozen parameter 'l0.weight'",
      [](Mlp& m) { m.layers[0]->weight.set_requires_grad(false); });
}

TEST(MisuseTest, OptimizerOverModuleParameters) {
  expect_error(
      [](Sharded& s) {
        torch::optim::SGD optimizer(s.module()->parameters(), 0.1);
      },
      "can't optimize a non-leaf Tensor");
}

TEST(MisuseTest, TorchSave) {
  expect_error(
      [](Sharded& s) {
        torch::serialize::OutputArchive archive;
        s.module()->save(archive);
        std::ostringstream out;
        archive.save_to(out);
      },
      "unit 'l0' is sharded");
}

TEST(MisuseTest, TorchClipGradNorm) {
  expect_error(
      [](Sharded& s) {
        torch::nn::utils::clip_grad_norm_(s.module()->parameters(), 1.0);
      },
      "use FullyShardedModule::clip_grad_norm");
}

TEST(MisuseTest, DataPointer) {
  expect_error([](Sharded& s) { s.module()->layers[0]->weight.data_ptr(); },
               "unit 'l0' is sharded");
}

TEST(MisuseTest, ViewUsedAfterReshard) {
  expect_error(
      [](Sharded& s) {
        const at::Tensor late = s.module()->layers[0]->weight.t();
        s.reshard();
        late + 1;
      },
      "a view of a parameter of unit 'l0'");
}

TEST(MisuseTest, StepBetweenForwardAndBackward) {
  expect_error(
      [](Sharded& s) {
        ShardedAdamW optimizer(s);
        const at::Tensor loss = s(input()).sum();
        optimizer.step();
        loss.backward();
      },
      "changed between forward and backward");
}

TEST(MisuseTest, SavedTensorChangedInPlace) {
  expect_error(
      [](Sharded& s) {
        at::Tensor h = at::tanh(s.module()->layers[0](input()));
        const at::Tensor y = s.module()->layers[1](h).sum();
        {
          at::NoGradGuard no_grad;
          h.zero_();
        }
        y.backward();
      },
      "modified in place");
}

TEST(MisuseTest, BackwardWithCreateGraph) {
  expect_error(
      [](Sharded& s) { s(input()).sum().backward({}, std::nullopt, true); },
      "create_graph");
}

TEST(MisuseTest, BackwardIntoAParameter) {
  expect_error(
      [](Sharded& s) {
        const at::Tensor loss = s(input()).sum();
        loss.backward({}, false, false,
                      at::TensorList({s.module()->layers[0]->weight}));
      },
      "use torch::autograd::grad");
}

TEST(MisuseTest, ModuleUsedAfterItsShardedModuleIsGone) {
  testing::run_ranks(1, [](ProcessGroups& groups) {
    std::shared_ptr<Mlp> model;
    {
      Sharded sharded = shard(groups);
      model = sharded.module();
    }
    EXPECT_THAT(message_of([&] { model->forward(input()); }),
                HasSubstr("was destroyed"));
  });
}

TEST(MisuseTest, ShardingTwice) {
  testing::run_ranks(1, [](ProcessGroups& groups) {
    Sharded sharded = shard(groups);
    const auto again = fully_shard(sharded.module(), groups);
    EXPECT_THAT(std::string(again.status().message()),
                HasSubstr("'l0.weight' is sharded already"));
  });
}

TEST(MisuseTest, PolicyThatMatchesNothingListsTheTypes) {
  testing::run_ranks(1, [](ProcessGroups& groups) {
    ShardOptions options;
    options.wrap_policy = module_if(
        [](const std::string&, torch::nn::Module&) { return false; }, "none");
    const auto sharded = fully_shard(std::make_shared<Mlp>(), groups, options);
    EXPECT_THAT(std::string(sharded.status().message()),
                HasSubstr("torch::nn::LinearImpl"));
  });
}

// --- what must work

TEST(MisuseTest, CloneIsAnOrdinaryCopyAndZeroGradDoesNothing) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    Sharded sharded = shard(groups);
    at::manual_seed(2);
    Mlp plain;
    EXPECT_TRUE(sharded.module()->layers[0]->weight.clone().equal(
        plain.layers[0]->weight));
    sharded.module()->zero_grad();
    good_step(sharded);
  });
}

TEST(MisuseTest, HookOnAParameterSeesTheLocalGradient) {
  testing::run_ranks(1, [](ProcessGroups& groups) {
    Sharded sharded = shard(groups);
    int calls = 0;
    sharded.module()->layers[1]->weight.register_hook([&](at::Tensor gradient) {
      EXPECT_EQ(gradient.sizes(), (at::IntArrayRef{6, 6}));
      ++calls;
    });
    good_step(sharded);
    EXPECT_EQ(calls, 1);
  });
}

struct Bomb : torch::autograd::Function<Bomb> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) {
    return x.clone();
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext*, torch::autograd::tensor_list) {
    throw std::runtime_error("bomb");
  }
};

// A step after `failure` has the gradient of a step before it.
void expect_good_step_after(const std::function<void(Sharded&)>& failure) {
  testing::run_ranks(2, [&](ProcessGroups& groups) {
    const double expected = good_step(shard(groups));
    for (bool in_first_step : {true, false}) {
      Sharded sharded = shard(groups);
      if (!in_first_step) good_step(sharded);
      EXPECT_ANY_THROW(failure(sharded));
      EXPECT_EQ(good_step(sharded), expected);
      EXPECT_EQ(good_step(sharded), expected);
      for (const UnitInfo& unit : sharded.units()) EXPECT_FALSE(unit.unsharded);
    }
  });
}

TEST(MisuseTest, StepAfterAnExceptionBeforeBackwardReachesAUnit) {
  expect_good_step_after(
      [](Sharded& s) { Bomb::apply(s(input())).sum().backward(); });
}

TEST(MisuseTest, StepAfterAnExceptionInTheMiddleOfBackward) {
  expect_good_step_after([](Sharded& s) {
    auto& layers = s.module()->layers;
    layers[0]((Bomb::apply(layers[1](layers[2](input()))))).sum().backward();
  });
}

TEST(MisuseTest, StepAfterAnExceptionInForward) {
  expect_good_step_after([](Sharded& s) { s(at::ones({4, 5})); });
}

TEST(MisuseTest, StepAfterAnExceptionInTheMiddleOfForward) {
  expect_good_step_after([](Sharded& s) {
    s.call(
        [&](at::Tensor x) -> at::Tensor {
          s.module()->layers[0](x);
          s.module()->layers[1](x);
          throw std::runtime_error("bomb");
        },
        input());
  });
}

TEST(MisuseTest, InferenceModeBeforeTraining) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    Sharded sharded = shard(groups);
    {
      c10::InferenceMode inference;
      sharded(input());
    }
    good_step(sharded);
  });
}

// Units that a forward left unsharded hold old values after a step.
TEST(MisuseTest, StaleCopyAfterAStepIsImpossible) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    for (bool torch_optim : {false, true}) {
      Sharded sharded = shard(groups);
      at::manual_seed(2);
      Mlp plain;
      std::vector<at::Tensor> locals;
      for (const LocalParameter& local : sharded.named_local_parameters()) {
        locals.push_back(local.tensor);
      }
      torch::optim::SGD sgd(locals, 0.5), plain_sgd(plain.parameters(), 0.5);
      AdamWOptions options;
      options.eps = 1;
      ShardedAdamW adamw(sharded, options);
      good_step(sharded);
      plain.forward(input()).sum().backward();
      const at::Tensor before = sharded(input());
      if (torch_optim) {
        sgd.step(), plain_sgd.step();
        EXPECT_TRUE(at::allclose(sharded(input()), plain.forward(input())));
        // The module itself, after a step without a backward: nothing tells the
        // other ranks, so it is an error, never an old value.
        const at::Tensor old = sharded(input());
        sgd.step();
        EXPECT_THAT([&] { sharded.module()->forward(input()); },
                    ThrowsMessage<c10::Error>(HasSubstr("call reshard()")));
        sharded.reshard();
        EXPECT_FALSE(sharded.module()->forward(input()).equal(old));
      } else {
        adamw.step();
        EXPECT_FALSE(sharded(input()).equal(before));
        EXPECT_FALSE(sharded.module()->forward(input()).equal(before));
      }
    }
  });
}

}  // namespace
}  // namespace fullshard
