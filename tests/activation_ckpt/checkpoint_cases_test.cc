// What users put into a checkpoint, and what they do around it.

#include <fstream>
#include <map>
#include <optional>
#include <string>

#include "ATen/ATen.h"
#include "fullshard/activation_ckpt/checkpoint.h"
#include "fullshard/core/saved_tensor_scope.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "torch/csrc/autograd/autograd.h"
#include "torch/utils.h"

namespace fullshard {
namespace {

using ::testing::HasSubstr;

at::Tensor data(double shift = 0) {
  at::manual_seed(8);
  return (at::randn({5, 6}) + shift).set_requires_grad(true);
}

template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

struct Inputs {
  at::Tensor x;
  std::map<std::string, at::Tensor> named;
  std::optional<at::Tensor> mask;
  std::optional<at::Tensor> absent;
  double factor = 1;
};
template <class F>
void for_each_tensor(Inputs& value, F&& f) {
  f(value.x);
  ::fullshard::for_each_tensor(value.named, f);
  ::fullshard::for_each_tensor(value.mask, f);
  ::fullshard::for_each_tensor(value.absent, f);
}

TEST(CheckpointCasesTest, StructsMapsAndOptionals) {
  const auto f = [](Inputs in) {
    EXPECT_FALSE(in.absent.has_value());
    return std::map<std::string, at::Tensor>{
        {"sum", (in.x * in.named.at("w")).sin() * *in.mask * in.factor},
        {"other", in.named.at("v").exp()}};
  };
  const auto train = [&](bool checkpointed) {
    Inputs in{data(), {{"w", data(1)}, {"v", data(2)}}, at::ones({6}), {}, 3};
    auto out = checkpointed ? checkpoint(f, in) : f(in);
    (out["sum"].sum() + out["other"].pow(2).sum()).backward();
    return std::vector<at::Tensor>{in.x.grad(), in.named["w"].grad(),
                                   in.named["v"].grad()};
  };
  const auto plain = train(false), recomputed = train(true);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(recomputed[i].equal(plain[i]));
}

TEST(CheckpointCasesTest, OutputsThatAreInputsOrViews) {
  const auto f = [](at::Tensor x) {
    return std::make_tuple(x, x.t(), x.exp().view({-1}), x.sin()[2]);
  };
  const auto train = [&](bool checkpointed) {
    const at::Tensor leaf = data();
    const at::Tensor x = leaf * 2;
    const auto [same, turned, flat, row] =
        checkpointed ? checkpoint(f, x) : f(x);
    EXPECT_EQ(same.data_ptr(), x.data_ptr());
    EXPECT_TRUE(turned.is_view());
    (same.sum() + turned.pow(2).sum() + flat.sum() + row.prod()).backward();
    return leaf.grad();
  };
  EXPECT_TRUE(train(true).equal(train(false)));
}

TEST(CheckpointCasesTest, InputsWithoutGradientAndNoTensorAtAll) {
  const at::Tensor weight = data();
  const at::Tensor mask = at::ones({6}), ids = at::arange(5);
  checkpoint(
      [&](at::Tensor m, at::Tensor i, int power) {
        return (weight.index_select(0, i) * m).pow(power);
      },
      mask, ids, 2)
      .sum()
      .backward();
  EXPECT_TRUE(weight.grad().equal(2 * weight.detach()));
  EXPECT_FALSE(mask.grad().defined());
  weight.mutable_grad() = at::Tensor();
  checkpoint([&] { return weight.pow(2); }).sum().backward();
  EXPECT_TRUE(weight.grad().equal(2 * weight.detach()));
  // An undefined tensor stays one.
  checkpoint(
      [&](at::Tensor none) {
        EXPECT_FALSE(none.defined());
        return weight.exp();
      },
      at::Tensor())
      .sum()
      .backward();
}

TEST(CheckpointCasesTest, SeveralFramesTwoBackwardsAndGradOfInputs) {
  const auto f = [](at::Tensor x) { return (x.sin() * x).exp(); };
  const auto train = [&](bool checkpointed) {
    const at::Tensor x = data();
    const auto run = [&](const at::Tensor& v) {
      return checkpointed ? checkpoint(f, v) : f(v);
    };
    const at::Tensor a = run(x), b = run(a.tanh()), c = run(a.cos());
    const at::Tensor first = b.sum(), second = (c * b).sum();
    first.backward({}, /*retain_graph=*/true);
    const at::Tensor of_input =
        torch::autograd::grad({second}, {x}, {}, /*retain_graph=*/true)[0];
    second.backward();
    return at::stack({x.grad(), of_input});
  };
  EXPECT_TRUE(train(true).equal(train(false)));
}

TEST(CheckpointCasesTest, OffloadedInputs) {
  const at::Tensor plain = data(), leaf = data();
  plain.mul(2).sin().exp().sum().backward();
  CheckpointOptions options;
  options.offload_inputs = true;
  at::Tensor x = leaf * 2;
  const at::Tensor y = checkpoint_with(
      options,
      [](at::Tensor v) {
        CheckpointOptions inner;
        inner.offload_inputs = true;  // Inside a frame: nothing to offload.
        return checkpoint_with(
                   inner, [](at::Tensor w) { return w.sin(); }, v)
            .exp();
      },
      x);
  {
    // Nothing refers to the input any more: not even this is seen.
    at::NoGradGuard no_grad;
    x.zero_();
  }
  y.sum().backward();
  EXPECT_TRUE(leaf.grad().equal(plain.grad()));
}

TEST(CheckpointCasesTest, WithoutPreservedRandomStateDropoutDiffers) {
  CheckpointOptions options;
  options.preserve_rng_state = false;
  const at::Tensor x = at::ones({400}).set_requires_grad(true);
  at::manual_seed(1);
  const at::Tensor y = checkpoint_with(
      options, [](at::Tensor v) { return at::dropout(v, 0.5, true).exp(); }, x);
  const at::Tensor dropped = y == 1;
  y.sum().backward();
  EXPECT_FALSE(((x.grad() == 0) == dropped).all().item<bool>());
}

TEST(CheckpointCasesTest, SavedTensorsThatDifferAreNamed) {
  const auto message = [](auto second, const CheckpointOptions& options) {
    bool first = true;
    const at::Tensor y = checkpoint_with(
        options,
        [&](at::Tensor x) {
          return std::exchange(first, false) ? (x.sin() * x).exp().sum()
                                             : second(x);
        },
        data());
    return error_of([&] { y.backward(); });
  };
  CheckpointOptions options;
  options.name = "layers.3.mlp";
  EXPECT_THAT(
      message([](at::Tensor x) { return x[0].sin().sum(); }, options),
      HasSubstr("checkpoint() in 'layers.3.mlp': saved tensor 1 of 4 is [6] of "
                "Float on cpu in the recomputed function, but was [5, 6] of "
                "Float on cpu in the first run"));
  EXPECT_THAT(
      message([](at::Tensor x) { return x.to(at::kDouble).sin().sum(); },
              options),
      HasSubstr("[5, 6] of Double on cpu in the recomputed"));
  EXPECT_THAT(message([](at::Tensor x) { return x.sin().sum(); }, options),
              HasSubstr("'layers.3.mlp': the recomputed function saved 1 "
                        "tensors, the first run saved 4"));
  // Without the check LibTorch's own errors or nothing at all.
  options.determinism_check = false;
  EXPECT_THAT(message(
                  [](at::Tensor x) {
                    x = x.to(at::kDouble);
                    return (x.sin() * x).exp().sum();
                  },
                  options),
              ::testing::Not(HasSubstr("saved tensor")));
}

TEST(CheckpointCasesTest, SavedTensorChangedInPlaceIsAnError) {
  const at::Tensor x = data();
  at::Tensor input = x * 1;
  const at::Tensor y =
      checkpoint([](at::Tensor v) { return v.exp().sin(); }, input);
  input.detach().add_(1);
  EXPECT_THAT(error_of([&] { y.sum().backward(); }),
              HasSubstr("was modified in place"));
  // Inside the frame, in the recompute.
  const at::Tensor z = checkpoint(
      [](at::Tensor v) {
        const at::Tensor e = v.exp();  // Saves its output.
        const at::Tensor s = e.sin();
        e.detach().add_(1);
        return s.cos();
      },
      data());
  EXPECT_THAT(error_of([&] { z.sum().backward(); }),
              HasSubstr("was modified in place"));
}

// Hooks of users see what they are innermost for.
TEST(CheckpointCasesTest, HooksOfUsersInsideAndOutside) {
  int packed = 0, unpacked = 0;
  const SavedTensorScope::Function pack = [&](const at::Tensor& tensor) {
    ++packed;
    return tensor.to(at::kDouble);
  };
  const SavedTensorScope::Function unpack = [&](const at::Tensor& tensor) {
    ++unpacked;
    return tensor.to(at::kFloat);
  };
  const auto f = [](at::Tensor v) { return v.sin().exp(); };
  const at::Tensor plain = data(), inside = data(), outside = data();
  f(plain).sum().backward();

  checkpoint(
      [&](at::Tensor v) {
        at::Tensor sine;
        {
          SavedTensorScope scope(pack, unpack);
          sine = v.sin();
        }
        return sine.exp();
      },
      inside)
      .sum()
      .backward();
  EXPECT_EQ(packed, 2);  // Once more in the recompute, for nobody.
  EXPECT_EQ(unpacked, 1);
  EXPECT_TRUE(inside.grad().equal(plain.grad()));

  packed = unpacked = 0;
  at::Tensor y;
  {
    SavedTensorScope scope(pack, unpack);
    y = checkpoint(f, outside);
  }
  EXPECT_EQ(packed, 1);  // The frame's input.
  y.sum().backward();
  EXPECT_EQ(unpacked, 1);
  EXPECT_TRUE(outside.grad().equal(plain.grad()));
}

TEST(CheckpointCasesTest, GradientsAreThoseOfPython) {
  std::ifstream file("tests/activation_ckpt/goldens/checkpoint_gradients.json");
  const auto golden = nlohmann::json::parse(file);
  const auto values = [](int64_t count, double phase) {
    return (at::arange(count, at::kDouble) * 0.7 + phase).sin().to(at::kFloat);
  };
  const at::Tensor first = values(24, 0.1).view({6, 4}).set_requires_grad(true);
  const at::Tensor second =
      values(24, 0.2).view({4, 6}).set_requires_grad(true);
  const at::Tensor scale = values(4, 0.3).set_requires_grad(true);
  const at::Tensor x = values(12, 0.4).view({3, 4}).set_requires_grad(true);
  const auto block = [&](at::Tensor v, at::Tensor s) {
    const at::Tensor hidden = at::gelu(v.mm(first.t()));
    return v + at::tanh(hidden.mm(second.t())) * s;
  };
  at::Tensor y = x;
  for (int i = 0; i < 3; ++i) y = checkpoint(block, y, scale);
  const at::Tensor loss = y.pow(2).mean();
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_NEAR(loss.item<double>(), golden["loss"].get<double>(), 1e-6);
  const std::map<std::string, at::Tensor> tensors = {
      {"first", first}, {"second", second}, {"scale", scale}, {"x", x}};
  for (const auto& [name, tensor] : tensors) {
    const auto expected = golden[name].get<std::vector<float>>();
    EXPECT_TRUE(at::allclose(tensor.grad().reshape({-1}), at::tensor(expected),
                             1e-5, 1e-6))
        << name;
  }
}

}  // namespace
}  // namespace fullshard
