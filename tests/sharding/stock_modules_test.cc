// Modules of LibTorch, sharded unmodified, give the gradients of the unsharded
// module, whatever a user does between forward and backward.

#include <functional>
#include <map>
#include <memory>

#include "ATen/ATen.h"
#include "fullshard/activation_ckpt/checkpoint.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/modules.h"
#include "torch/utils.h"

namespace fullshard {
namespace {

namespace nn = torch::nn;

// Wraps any LibTorch module so that each of its children is a unit.
template <class Inner>
struct Stock : nn::Module {
  using Run = std::function<at::Tensor(Stock&, const at::Tensor&)>;
  Stock(std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>> parts,
        Inner inner, Run run)
      : inner(inner), run(std::move(run)) {
    for (auto& [name, part] : parts) register_module(name, part);
  }
  at::Tensor forward(const at::Tensor& x) { return run(*this, x); }
  Inner inner;
  Run run;
};

using Loss = std::function<void(const std::function<at::Tensor(at::Tensor)>&)>;

// The parameters and buffers after p -= gradient: shows each gradient at its
// place.
std::map<std::string, at::Tensor> after_unit_step(ShardedModule& sharded) {
  at::NoGradGuard no_grad;
  for (const LocalParameter& local : sharded.named_local_parameters()) {
    if (local.tensor.grad().defined()) local.tensor.sub_(local.tensor.grad());
  }
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

// Makes the module twice from one seed, shards one and compares gradients, over
// one and two ranks. All ranks see the same data, so the mean is the gradient
// itself.
template <class Make>
void expect_equal_gradients(Make make, const Loss& train) {
  auto compare = [&](ProcessGroups& groups) {
    at::manual_seed(5);
    auto plain = make();
    at::manual_seed(5);
    auto model = make();
    ShardOptions options;
    options.wrap_policy = module_if([](const std::string& name, nn::Module&) {
      return !name.empty() && name.find('.') == std::string::npos;
    });
    auto sharded = fully_shard(model, groups, options);
    ASSERT_TRUE(sharded.ok()) << sharded.status();
    for (int step = 0; step < 3; ++step) {  // The last prefetches.
      plain->zero_grad();
      sharded->zero_grad();
      at::manual_seed(9);
      train([&](at::Tensor x) { return plain->forward(x); });
      at::manual_seed(9);
      train([&](at::Tensor x) { return (*sharded)(x); });
    }
    for (const UnitInfo& unit : sharded->units()) EXPECT_FALSE(unit.unsharded);
    const auto state = after_unit_step(*sharded);
    at::NoGradGuard no_grad;
    for (auto& item : plain->named_parameters()) {
      at::Tensor expected = item.value().detach().clone();
      at::Tensor gradient = item.value().grad();
      if (gradient.defined()) expected.sub_(gradient.to_dense());
      EXPECT_TRUE(at::allclose(state.at(item.key()), expected, 1e-5, 1e-6))
          << item.key();
    }
    for (auto& item : plain->named_buffers()) {
      EXPECT_TRUE(at::allclose(state.at(item.key()), item.value(), 1e-5, 1e-6))
          << item.key();
    }
  };
  testing::run_ranks(1, compare);
  testing::run_ranks(2, compare);
}

const Loss kSquare = [](const auto& forward) {
  forward(at::randn({4, 2, 6})).pow(2).mean().backward();
};

auto transformer() {
  nn::TransformerEncoderLayer layer(
      nn::TransformerEncoderLayerOptions(6, 2).dim_feedforward(9));
  nn::TransformerEncoder encoder(
      nn::TransformerEncoderOptions(layer, /*num_layers=*/2));
  nn::LayerNorm norm(nn::LayerNormOptions({6}));
  using M = Stock<nn::TransformerEncoder>;
  return std::make_shared<M>(
      std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
          {"encoder", encoder.ptr()}, {"norm", norm.ptr()}},
      encoder,
      [norm](M& m, const at::Tensor& x) mutable { return norm(m.inner(x)); });
}

auto recurrent() {
  nn::LSTM lstm(nn::LSTMOptions(6, 8).num_layers(2).bidirectional(true));
  nn::Linear out(16, 6);
  using M = Stock<nn::LSTM>;
  return std::make_shared<M>(
      std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
          {"lstm", lstm.ptr()}, {"out", out.ptr()}},
      lstm, [out](M& m, const at::Tensor& x) mutable {
        return out(std::get<0>(m.inner(x)));
      });
}

auto convolution() {
  nn::Conv2d conv(nn::Conv2dOptions(2, 4, 3).padding(1));
  nn::BatchNorm2d norm(4);
  nn::Linear out(6, 6);
  using M = Stock<nn::Conv2d>;
  return std::make_shared<M>(
      std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
          {"conv", conv.ptr()}, {"norm", norm.ptr()}, {"out", out.ptr()}},
      conv, [norm, out](M& m, const at::Tensor& x) mutable {
        return out(norm(m.inner(
            x.unsqueeze(0).transpose(1, 2).contiguous().view({1, 2, 4, 6}))));
      });
}

auto attention() {
  nn::LayerNorm norm(nn::LayerNormOptions({6}));
  nn::MultiheadAttention mha(nn::MultiheadAttentionOptions(6, 2));
  using M = Stock<nn::MultiheadAttention>;
  return std::make_shared<M>(
      std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
          {"norm", norm.ptr()}, {"mha", mha.ptr()}},
      mha, [norm](M& m, const at::Tensor& x) mutable {
        const at::Tensor h = norm(x);
        return x + std::get<0>(m.inner(h, h, h));
      });
}

auto tied_embedding(bool sparse) {
  nn::Embedding embed(nn::EmbeddingOptions(11, 6).sparse(sparse));
  nn::Linear mid(6, 6);
  using M = Stock<nn::Embedding>;
  return std::make_shared<M>(
      std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
          {"embed", embed.ptr()}, {"mid", mid.ptr()}},
      embed, [mid](M& m, const at::Tensor& x) mutable {
        const at::Tensor ids = x.abs().mul(3).to(at::kLong).clamp(0, 10);
        return torch::linear(mid(m.inner(ids)), m.inner->weight);
      });
}

// Views that live across touches, and operators on several units.
auto views() {
  nn::Linear a(6, 6), b(6, 6), q(6, 18);
  using M = Stock<nn::Linear>;
  return std::make_shared<M>(
      std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
          {"a", a.ptr()}, {"b", b.ptr()}, {"q", q.ptr()}},
      a, [b, q](M& m, const at::Tensor& input) {
        auto& a = m.inner;
        const at::Tensor late = a->weight.t();
        at::Tensor x = input.matmul(a->weight.t().contiguous()) +
                       b->weight[0] * b->bias.slice(0, 0, 2).repeat({3});
        const auto p = torch::linear(x, q->weight, q->bias).chunk(3, -1);
        x = at::scaled_dot_product_attention(
                p[0].unsqueeze(1), p[1].unsqueeze(1), p[2].unsqueeze(1))
                .squeeze(1)
                .matmul(late);
        return x + at::einsum("ij,kj->ik", {a->weight, b->weight}).sum() +
               (a->weight * b->weight).sum() +
               at::cat({a->weight.view(-1), b->weight.view(-1), q->bias})
                   .pow(2)
                   .sum();
      });
}

TEST(StockModulesTest, TransformerEncoder) {
  expect_equal_gradients(transformer, kSquare);
}

TEST(StockModulesTest, Lstm) { expect_equal_gradients(recurrent, kSquare); }

TEST(StockModulesTest, ConvolutionWithBatchNorm) {
  expect_equal_gradients(convolution, kSquare);
}

TEST(StockModulesTest, MultiheadAttention) {
  expect_equal_gradients(attention, kSquare);
}

TEST(StockModulesTest, DenseEmbeddingUsedTwice) {
  expect_equal_gradients([] { return tied_embedding(false); }, kSquare);
}

TEST(StockModulesTest, SparseEmbeddingUsedTwice) {
  expect_equal_gradients([] { return tied_embedding(true); }, kSquare);
}

TEST(StockModulesTest, ViewsAndOperatorsOverSeveralUnits) {
  expect_equal_gradients(views, kSquare);
}

TEST(StockModulesTest, TwoForwardsOneBackward) {
  expect_equal_gradients(attention, [](const auto& forward) {
    const at::Tensor a = forward(at::randn({4, 2, 6}));
    (a + forward(at::randn({4, 2, 6}))).sum().backward();
  });
}

TEST(StockModulesTest, ForwardOfForward) {
  expect_equal_gradients(attention, [](const auto& forward) {
    forward(forward(at::randn({4, 2, 6}))).sum().backward();
  });
}

TEST(StockModulesTest, BackwardTwiceOnARetainedGraph) {
  expect_equal_gradients(recurrent, [](const auto& forward) {
    at::Tensor loss = forward(at::randn({4, 2, 6})).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
}

TEST(StockModulesTest, GradientPenalty) {
  expect_equal_gradients(convolution, [](const auto& forward) {
    at::Tensor x = at::randn({4, 2, 6}).set_requires_grad(true);
    at::Tensor y = forward(x).pow(2).sum();
    const at::Tensor g = torch::autograd::grad(
        {y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    (g.pow(2).sum() + y).backward();
  });
}

TEST(StockModulesTest, GradientOfInputsBeforeBackward) {
  expect_equal_gradients(attention, [](const auto& forward) {
    at::Tensor x = at::randn({4, 2, 6}).set_requires_grad(true);
    at::Tensor y = forward(x).pow(2).sum();
    torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true);
    y.backward();
  });
}

TEST(StockModulesTest, LstmInsideACheckpoint) {
  expect_equal_gradients(recurrent, [](const auto& forward) {
    checkpoint([forward](at::Tensor x) { return forward(x); },
               at::randn({4, 2, 6}))
        .pow(2)
        .mean()
        .backward();
  });
}

}  // namespace
}  // namespace fullshard
