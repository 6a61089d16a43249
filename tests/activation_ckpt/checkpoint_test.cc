#include "fullshard/activation_ckpt/checkpoint.h"

#include "ATen/ATen.h"
#include "ATen/autocast_mode.h"
#include "fullshard/activation_ckpt/checkpointable.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/testing/counting_backend.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "fullshard/tests/testing/tiny_models.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/linear.h"
#include "torch/utils.h"

namespace fullshard {
namespace {

using ::testing::HasSubstr;
using testing::TinyBlockImpl;
using testing::TinyTransformerImpl;

struct Mlp {
  Mlp() {
    at::manual_seed(4);
    a = torch::nn::Linear(6, 6), b = torch::nn::Linear(6, 6);
  }
  at::Tensor operator()(const at::Tensor& x) { return b(at::tanh(a(x))).sin(); }
  std::vector<at::Tensor> gradients() const {
    return {a->weight.grad(), a->bias.grad(), b->weight.grad(), b->bias.grad()};
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};

void expect_equal(const Mlp& actual, const Mlp& expected) {
  for (size_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(actual.gradients()[i].defined());
    EXPECT_TRUE(actual.gradients()[i].equal(expected.gradients()[i])) << i;
  }
}

at::Tensor data() {
  at::manual_seed(8);
  return at::randn({5, 6});
}

TEST(CheckpointTest, GradientsAreEqualToTheBit) {
  Mlp plain, recomputed;
  plain(data()).pow(2).sum().backward();
  checkpoint([&](at::Tensor x) { return recomputed(x); }, data())
      .pow(2)
      .sum()
      .backward();
  expect_equal(recomputed, plain);
}

TEST(CheckpointTest, RecomputesOnceAndStopsEarly) {
  int starts = 0, ends = 0;
  Mlp mlp;
  at::Tensor y = checkpoint(
      [&](at::Tensor x) {
        ++starts;
        at::Tensor out = mlp(x);
        ++ends;  // All that backward needs is saved by now.
        return out;
      },
      data());
  EXPECT_EQ(starts, 1);
  y.sum().backward();
  EXPECT_EQ(starts, 2);
  EXPECT_EQ(ends, 1);
}

TEST(CheckpointTest, KeepsNothingButTheInputs) {
  at::Tensor x = data().set_requires_grad(true);
  std::vector<float> memory(30, 2);
  bool freed = false;
  at::Tensor y = checkpoint(
      [&](at::Tensor v) {
        // The product saves its second factor.
        return v * at::from_blob(
                       memory.data(), {5, 6}, [&](void*) { freed = true; },
                       at::TensorOptions().dtype(at::kFloat));
      },
      x);
  EXPECT_TRUE(freed);
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(at::full({5, 6}, 2.f)));
}

TEST(CheckpointTest, NestedPartialRetainedAndLast) {
  Mlp plain, recomputed;
  auto run = [](auto outer, const at::Tensor& x) {
    at::Tensor loss = outer(x).sum();
    torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  };
  run([&](at::Tensor x) { return plain(plain(x)); },
      data().set_requires_grad(true));
  auto inner = [&](at::Tensor x) { return recomputed(x); };
  run(
      [&](at::Tensor x) {
        return checkpoint(
            [&](at::Tensor v) {
              return checkpoint(inner, checkpoint(inner, v));
            },
            x);
      },
      data().set_requires_grad(true));
  expect_equal(recomputed, plain);
}

TEST(CheckpointTest, DropoutIsTheSameAndTheGeneratorMovesOnce) {
  auto train = [](bool recompute) {
    Mlp mlp;
    torch::nn::Dropout dropout(0.5);
    auto f = [&](at::Tensor x) { return dropout(mlp(dropout(x))); };
    at::Tensor x = data();
    at::manual_seed(6);
    (recompute ? checkpoint(f, x) : f(x)).sum().backward();
    return std::make_pair(mlp, at::rand({1}));
  };
  const auto [plain, next] = train(false);
  const auto [recomputed, next_after] = train(true);
  expect_equal(recomputed, plain);
  EXPECT_TRUE(next.equal(next_after));
}

TEST(CheckpointTest, SeveralInputsAndOutputsNested) {
  auto f = [](std::pair<at::Tensor, std::vector<at::Tensor>> in, double scale) {
    return std::make_tuple(in.first * in.second[0] * scale, in.second[1].exp());
  };
  at::Tensor a = data().set_requires_grad(true);
  at::Tensor b = (data() + 1).set_requires_grad(true), c = data();
  const std::pair<at::Tensor, std::vector<at::Tensor>> in(a, {b, c});
  auto [y, z] = checkpoint(f, in, 3.0);
  (y.sum() + z.sum()).backward();
  EXPECT_TRUE(a.grad().equal(b.detach() * 3.0));
  EXPECT_TRUE(b.grad().equal(a.detach() * 3.0));
  EXPECT_FALSE(c.grad().defined());
}

TEST(CheckpointTest, AutocastInsideBackwardOutside) {
  auto train = [](bool recompute) {
    Mlp mlp;
    auto f = [&](at::Tensor x) { return mlp(x); };
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::Tensor y = recompute ? checkpoint(f, data()) : f(data());
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    y.to(at::kFloat).sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    return mlp;
  };
  expect_equal(train(true), train(false));
}

TEST(CheckpointTest, WithoutGradientsItOnlyCalls) {
  at::NoGradGuard no_grad;
  int calls = 0;
  checkpoint([&](at::Tensor x) { return ++calls, x; }, data());
  EXPECT_EQ(calls, 1);
}

TEST(CheckpointTest, FunctionThatDiffersIsAnError) {
  int calls = 0;
  Mlp mlp;
  at::Tensor y = checkpoint(
      [&](at::Tensor x) { return calls++ == 0 ? mlp(mlp(x)) : mlp(x); },
      data());
  try {
    y.sum().backward();
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("must do the same both times"));
  }
}

TEST(CheckpointTest, ExceptionInTheRecomputeLeavesTheNextStepGood) {
  Mlp plain, mlp;
  bool fail = false;
  auto f = [&](at::Tensor x) {
    if (fail) throw std::runtime_error("in recompute");
    return mlp(x);
  };
  at::Tensor y = checkpoint(f, data());
  fail = true;
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  fail = false;
  mlp.a->zero_grad(), mlp.b->zero_grad();
  checkpoint(f, data()).sum().backward();
  plain(data()).sum().backward();
  expect_equal(mlp, plain);
}

// After a region, also one that failed, autograd keeps tensors by itself again:
// nothing of this function runs in backward.
TEST(CheckpointTest, LeavesNoHooksBehind) {
  for (bool fails : {false, true}) {
    int calls = 0;
    Mlp mlp;
    auto f = [&](at::Tensor x) {
      ++calls;
      const at::Tensor y = mlp(x);
      if (fails) throw std::runtime_error("in forward");
      return y;
    };
    try {
      checkpoint(f, data());
    } catch (const std::runtime_error&) {
    }
    mlp(data()).sum().backward();
    EXPECT_EQ(calls, 1);
  }
}

struct SwitchedImpl : torch::nn::Module, Checkpointable<SwitchedImpl> {
  at::Tensor forward(const at::Tensor& x) {
    return checkpointed(&SwitchedImpl::run, x);
  }
  at::Tensor run(const at::Tensor& x) {
    ++runs;
    return x.sin().exp();
  }
  int runs = 0;
};

TEST(CheckpointableTest, RecomputesWhenTurnedOn) {
  auto model = std::make_shared<SwitchedImpl>();
  auto all = [](const std::string&, torch::nn::Module&) { return true; };
  auto runs_of_a_step = [&] {
    model->runs = 0;
    model->forward(data().set_requires_grad(true)).sum().backward();
    return model->runs;
  };
  EXPECT_EQ(runs_of_a_step(), 1);
  EXPECT_EQ(apply_activation_checkpointing(*model, all).value(), 1);
  EXPECT_EQ(runs_of_a_step(), 2);
  model->set_activation_checkpointing(false);
  EXPECT_EQ(runs_of_a_step(), 1);
}

TEST(CheckpointableTest, NoMatchIsAnError) {
  TinyTransformerImpl model(2, 6, 13);
  const auto count = apply_activation_checkpointing(
      model, [](const std::string&, torch::nn::Module&) { return false; });
  EXPECT_EQ(count.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(CheckpointableTest, AddsNoPrefixToNames) {
  TinyTransformerImpl model(2, 6, 13);
  const auto before = model.named_parameters().keys();
  EXPECT_EQ(apply_activation_checkpointing(
                model,
                [](const std::string&, torch::nn::Module& m) {
                  return dynamic_cast<TinyBlockImpl*>(&m) != nullptr;
                })
                .value(),
            2);
  EXPECT_EQ(model.named_parameters().keys(), before);
}

TEST(CheckpointableTest, NamesAMatchThatIsNotCheckpointable) {
  TinyTransformerImpl model(2, 6, 13);
  const auto count = apply_activation_checkpointing(
      model, [](const std::string& name, torch::nn::Module&) {
        return name == "head";
      });
  EXPECT_THAT(std::string(count.status().message()), HasSubstr("'head'"));
  EXPECT_THAT(std::string(count.status().message()), HasSubstr("LinearImpl"));
}

// A frame around several units gathers each twice: forward and recompute.
TEST(CheckpointShardedTest, FrameOverSeveralUnitsGathersEachTwice) {
  testing::run_ranks(2, [](ProcessGroups& real) {
    auto backend = c10::make_intrusive<testing::CountingBackend>(real.world());
    ProcessGroups groups(real.env(), "shm", real.device(), backend, backend,
                         real.replicate_group());
    at::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(6, 6),
                                torch::nn::Linear(6, 6),
                                torch::nn::Linear(6, 6));
    ShardOptions options;
    options.wrap_policy = module_type<torch::nn::LinearImpl>();
    auto sharded = fully_shard(model, groups, options).value();
    for (int step = 0; step < 2; ++step) {
      backend->reset();
      checkpoint([&](at::Tensor x) { return model->forward(at::tanh(x)); },
                 at::ones({2, 6}).set_requires_grad(true))
          .sum()
          .backward();
      if (step == 0) continue;  // It also compares the order of the ranks.
      EXPECT_EQ(backend->count("all_gather").num_calls, 2 * 3);
    }
  });
}

}  // namespace
}  // namespace fullshard
