#include "ATen/ATen.h"
#include "fullshard/activation_ckpt/checkpoint.h"
#include "fullshard/activation_ckpt/checkpointable.h"
#include "fullshard/tests/testing/allocation_counter.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "fullshard/tests/testing/tiny_models.h"
#include "gmock/gmock.h"
#include "torch/library.h"
#include "torch/utils.h"

namespace fullshard {
namespace {

using ::testing::HasSubstr;
using testing::TinyBlockImpl;
using testing::TinyTransformerImpl;

int g_products = 0;

// As a custom operator would be: a product that counts its kernel's runs.
TORCH_LIBRARY(fullshard_test, m) {
  m.def("product(Tensor a, Tensor b) -> Tensor");
  m.def("split(Tensor a) -> (Tensor, Tensor)");
  m.def("noisy(Tensor a) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("parts(Tensor a) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(fullshard_test, CPU, m) {
  m.impl("product", [](const at::Tensor& a, const at::Tensor& b) {
    ++g_products;
    return at::mul(a, b);
  });
  m.impl("split", [](const at::Tensor& a) {
    ++g_products;
    return std::make_tuple(a.clone(), a.exp());
  });
}

struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& a, const at::Tensor& b) {
    context->save_for_backward({a, b});
    at::AutoDispatchBelowAutograd below;
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("fullshard_test::product", "")
            .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
    return op.call(a, b);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], gradients[0] * saved[0]};
  }
};

CheckpointOptions keeping(const std::vector<std::string>& names) {
  CheckpointOptions options;
  options.keep = KeptOperators::create(names).value();
  return options;
}

at::Tensor data() {
  at::manual_seed(8);
  return at::randn({5, 6}).set_requires_grad(true);
}

// What backward reaches: two products, of which the second's factor is an
// output of the first.
at::Tensor products(const at::Tensor& x) {
  return Product::apply(Product::apply(x, x.sin()), x).tanh();
}

TEST(SelectiveCheckpointTest, KeptOperatorsRunOnce) {
  const at::Tensor plain = data(), kept = data(), recomputed = data();
  products(plain).sum().backward();
  const auto runs_of = [](const CheckpointOptions& options,
                          const at::Tensor& x) {
    g_products = 0;
    checkpoint_with(
        options, [](at::Tensor v) { return products(v); }, x)
        .sum()
        .backward();
    return g_products;
  };
  EXPECT_EQ(runs_of({}, recomputed), 4);
  EXPECT_EQ(runs_of(keeping({"fullshard_test::product"}), kept), 2);
  EXPECT_TRUE(kept.grad().equal(plain.grad()));
  EXPECT_TRUE(recomputed.grad().equal(plain.grad()));
}

TEST(SelectiveCheckpointTest, TransformerBlocksGiveTheSameBits) {
  const auto train = [](const CheckpointOptions* options) {
    at::manual_seed(3);
    TinyTransformerImpl model(3, 8, 13);
    if (options != nullptr) {
      EXPECT_TRUE(apply_activation_checkpointing(
                      model,
                      [](const std::string&, torch::nn::Module& module) {
                        return dynamic_cast<TinyBlockImpl*>(&module) != nullptr;
                      },
                      *options)
                      .ok());
    }
    const at::Tensor tokens = at::arange(14).view({2, 7}).remainder(13);
    const at::Tensor loss = model.forward(tokens).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    std::vector<at::Tensor> gradients;
    for (const auto& p : model.parameters()) gradients.push_back(p.grad());
    return gradients;
  };
  const auto plain = train(nullptr);
  CheckpointOptions selective;
  selective.keep = matmuls_and_attention();
  const auto kept = train(&selective);
  ASSERT_EQ(kept.size(), plain.size());
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_TRUE(kept[i].equal(plain[i])) << i;
  }
}

// A frame inside another: with operators of its own, or with the outer one's.
TEST(SelectiveCheckpointTest, Nested) {
  const at::Tensor plain = data();
  products(products(plain)).sum().backward();
  const auto keep = keeping({"fullshard_test::product"});
  for (bool outer : {false, true}) {
    for (bool inner : {false, true}) {
      const at::Tensor x = data();
      const auto once = [&](at::Tensor v) {
        return checkpoint_with(
            inner ? keep : CheckpointOptions(),
            [](at::Tensor w) { return products(w); }, v);
      };
      for (int pass = 0; pass < 2; ++pass) {
        x.mutable_grad() = at::Tensor();
        checkpoint_with(
            outer ? keep : CheckpointOptions(),
            [&](at::Tensor v) { return once(once(v)); }, x)
            .sum()
            .backward();
        EXPECT_TRUE(x.grad().equal(plain.grad())) << outer << inner;
      }
    }
  }
}

// In place, also where the version counter does not tell: linear() adds the
// bias to an _unsafe_view of the product.
TEST(SelectiveCheckpointTest, KeptOutputsMayBeWrittenTo) {
  const at::Tensor weight = at::randn({4, 6}), bias = at::randn({4});
  const auto f = [&](at::Tensor x) {
    x = Product::apply(x, x).add_(1).exp();
    x = at::linear(x.view({5, 2, 3}).transpose(0, 1).reshape({2, 5, 3}),
                   weight.view({8, 3}), bias.repeat(2));
    return at::linear(x.transpose(0, 1), weight.view({3, 8}), bias.slice(0, 1))
        .sin()
        .mul_(2);
  };
  const auto options =
      keeping({"fullshard_test::product", "aten::mm", "aten::addmm"});
  const auto train = [&](bool checkpointed) {
    const at::Tensor x = data();
    const at::Tensor y = checkpointed ? checkpoint_with(options, f, x) : f(x);
    y.sum().backward({}, /*retain_graph=*/true);
    y.sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(train(true).equal(train(false)));
}

// Results that are kept outputs belong to the caller.
TEST(SelectiveCheckpointTest, ResultsMayBeWrittenTo) {
  const auto train = [](bool checkpointed) {
    const at::Tensor x = data();
    const auto f = [](at::Tensor v) {
      at::Tensor product = Product::apply(v, v);
      return std::make_pair(product, at::_unsafe_view(product, {-1}).exp());
    };
    auto [product, other] =
        checkpointed
            ? checkpoint_with(keeping({"fullshard_test::product"}), f, x)
            : f(x);
    product.add_(1);
    (product * other.view({5, 6})).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(train(true).equal(train(false)));
}

TEST(SelectiveCheckpointTest, AKeptOutputChangedLaterIsAnError) {
  at::Tensor seen;
  const at::Tensor y = checkpoint_with(
      keeping({"fullshard_test::product"}),
      [&](at::Tensor x) {
        seen = Product::apply(x, x);
        return seen.exp();
      },
      data());
  seen.detach().add_(1);
  try {
    y.sum().backward();
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("the kept output of fullshard_test::product, of "
                          "shape [5, 6], was modified in place"));
  }
}

TEST(SelectiveCheckpointTest, AnotherOrderOfOperatorsIsAnError) {
  bool first = true;
  auto options = keeping({"aten::mm", "aten::bmm"});
  options.name = "layers.3";
  const at::Tensor y = checkpoint_with(
      options,
      [&](at::Tensor x) {
        const at::Tensor y = x.exp();
        return (std::exchange(first, false)
                    ? at::mm(y.detach(), y.detach().t())
                    : at::bmm(y.detach().unsqueeze(0),
                              y.detach().t().unsqueeze(0))[0]) *
               y.sum();
      },
      data());
  try {
    y.sum().backward();
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("checkpoint() in 'layers.3': the recomputed function "
                          "calls aten::bmm where the first run called "
                          "aten::mm"));
  }
}

TEST(SelectiveCheckpointTest, OperatorsThatCannotBeKeptAreNamed) {
  const auto message = [](const char* name) {
    return std::string(KeptOperators::create({name}).status().message());
  };
  EXPECT_THAT(message("aten::matmull"),
              HasSubstr("no operator 'aten::matmull'"));
  EXPECT_THAT(message("aten::t"), HasSubstr("'aten::t' cannot be kept"));
  EXPECT_THAT(message("aten::add_.Tensor"), HasSubstr("writes"));
  EXPECT_THAT(message("fullshard_test::parts"), HasSubstr("a list"));
  // Nothing to keep, but no error: it is recomputed.
  EXPECT_TRUE(KeptOperators::create({"fullshard_test::noisy"}).ok());
}

TEST(SelectiveCheckpointTest, SeveralOutputs) {
  at::Tensor plain = data(), kept = data();
  const auto f = [](at::Tensor x) {
    at::Tensor cloned, exponential;
    {
      at::NoGradGuard no_grad;
      static const auto op =
          c10::Dispatcher::singleton()
              .findSchemaOrThrow("fullshard_test::split", "")
              .typed<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&)>();
      std::tie(cloned, exponential) = op.call(x);
    }
    return (x * exponential).sin() * cloned;
  };
  f(plain).sum().backward();
  g_products = 0;
  checkpoint_with(keeping({"fullshard_test::split"}), f, kept).sum().backward();
  EXPECT_EQ(g_products, 1);
  EXPECT_TRUE(kept.grad().equal(plain.grad()));
}

// Dropout inside fused attention and beside it: what draws random numbers is
// recomputed, so that the generator moves as it did.
TEST(SelectiveCheckpointTest, RandomOperatorsStayInStep) {
  const auto train = [](bool checkpointed) {
    const at::Tensor x = data();
    const auto f = [](at::Tensor v) {
      v = at::dropout(v.mm(v.t()).mm(v), 0.5, /*train=*/true).tanh();
      return at::dropout(v.mm(v.t()).mm(v), 0.5, /*train=*/true).tanh();
    };
    CheckpointOptions options;
    options.keep = KeptOperators::create(
                       {"aten::mm", "aten::native_dropout", "aten::bernoulli"})
                       .value();
    at::manual_seed(2);
    (checkpointed ? checkpoint_with(options, f, x) : f(x)).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(train(true).equal(train(false)));
}

TEST(SelectiveCheckpointTest, EveryKthBlock) {
  TinyTransformerImpl model(7, 8, 13);
  const auto is_block = [](const std::string&, torch::nn::Module& module) {
    return dynamic_cast<TinyBlockImpl*>(&module) != nullptr;
  };
  EXPECT_EQ(
      apply_activation_checkpointing(model, every_kth(3, is_block)).value(), 3);
  std::string on;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const auto* block = dynamic_cast<CheckpointSwitch*>(item.value().get());
    if (block == nullptr || !block->activation_checkpointing()) continue;
    EXPECT_EQ(block->checkpoint_options().name, item.key());
    on += item.key() + " ";
  }
  EXPECT_EQ(on, "block0 block3 block6 ");
}

// Bytes that a chain of blocks holds when forward has ended, and at most in
// backward.
TEST(CheckpointMemoryTest, BackwardHoldsOneLiveBlock) {
  testing::expect_success(testing::collect_processes(1, [](const LaunchEnv&) {
    testing::AllocationCounter allocations;
    const auto bytes_of = [&](int num_blocks,
                              const CheckpointOptions* options) {
      at::manual_seed(3);
      TinyTransformerImpl model(num_blocks, 32, 13);
      if (options != nullptr) {
        EXPECT_TRUE(apply_activation_checkpointing(
                        model,
                        [](const std::string&, torch::nn::Module& module) {
                          return dynamic_cast<TinyBlockImpl*>(&module) !=
                                 nullptr;
                        },
                        *options)
                        .ok());
      }
      const at::Tensor tokens = at::zeros({4, 64}, at::kLong);
      for (auto& p : model.parameters()) {
        p.mutable_grad() = at::zeros_like(p);
      }
      const int64_t before = allocations.now();
      const at::Tensor loss = model.forward(tokens).sum();
      const int64_t kept = allocations.now() - before;
      allocations.reset_peak();
      loss.backward();
      return std::make_pair(kept, allocations.peak() - before);
    };
    const int64_t input = 4 * 64 * 32 * sizeof(float);
    const auto [plain4, plain4_peak] = bytes_of(4, nullptr);
    const auto [plain8, plain8_peak] = bytes_of(8, nullptr);
    const int64_t block = (plain8 - plain4) / 4;
    CheckpointOptions options;
    const auto [kept4, peak4] = bytes_of(4, &options);
    const auto [kept8, peak8] = bytes_of(8, &options);
    // Of every block only its input is kept. (The random state is 5 KB.)
    EXPECT_NEAR(kept8 - kept4, 4 * (input + 5056), 4096);
    // Twice as many blocks: no more at once than their inputs.
    EXPECT_LE(peak8 - peak4, 4 * (input + 5056) + 4096);
    EXPECT_LE(peak8, kept8 + 2 * block);
    EXPECT_LT(peak8, plain8_peak / 2);
    options.keep = matmuls_and_attention();
    const auto [selective8, selective8_peak] = bytes_of(8, &options);
    EXPECT_GT(selective8, kept8);
    EXPECT_LT(selective8, plain8 * 3 / 4);
    EXPECT_LT(selective8_peak, plain8_peak);
  }));
}

}  // namespace
}  // namespace fullshard
