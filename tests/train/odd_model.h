#ifndef FULLSHARD_TESTS_TRAIN_ODD_MODEL_H_
#define FULLSHARD_TESTS_TRAIN_ODD_MODEL_H_

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "fullshard/sharding/fully_shard.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {
namespace testing {

using State = std::map<std::string, at::Tensor>;

// Sizes that nothing divides; tied, transposed, complex, frozen, 0-dim and
// unused parameters; a buffer, and dropout.
struct OddModel : torch::nn::Module {
  OddModel() {
    at::manual_seed(3);
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(7, 7)));
    }
    head = register_module("head", std::make_shared<Head>(layers[0]->weight));
    turned = register_parameter("turned", at::randn({3, 7}).t());
    wave = register_parameter("wave", at::randn({7}, at::kComplexFloat));
    scale = register_parameter("scale", at::randn({}));
    frozen = register_parameter("frozen", at::randn({5}).to(at::kBFloat16),
                                /*requires_grad=*/false);
    unused = register_parameter("unused", at::randn({6}));
    seen = register_buffer("seen", at::zeros({1}, at::kLong));
    dropout = register_module("dropout", torch::nn::Dropout(0.3));
  }
  struct Head : torch::nn::Module {
    explicit Head(at::Tensor shared)
        : weight(register_parameter("weight", std::move(shared))) {}
    at::Tensor weight;
  };
  at::Tensor forward(at::Tensor x) {
    seen.add_(1);
    for (auto& layer : layers) x = at::tanh(layer(x));
    x = dropout(x) * scale + at::real(wave) * at::imag(wave);
    return at::linear(x, head->weight).matmul(turned).pow(2).mean();
  }
  std::vector<torch::nn::Linear> layers;
  std::shared_ptr<Head> head;
  torch::nn::Dropout dropout{nullptr};
  at::Tensor turned, wave, scale, frozen, unused, seen;
};

inline ShardOptions layer_units() {
  ShardOptions options;
  options.wrap_policy = module_type<torch::nn::LinearImpl>();
  return options;
}

inline State state_of(const ShardedModule& model) {
  State state;
  EXPECT_TRUE(model
                  .full_state_dict(
                      [&](const std::string& name, const at::Tensor& tensor) {
                        state[name] = tensor.clone();
                        return absl::OkStatus();
                      },
                      /*all_ranks=*/true)
                  .ok());
  return state;
}

inline void expect_equal(const State& actual, const State& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    EXPECT_TRUE(actual.at(name).equal(tensor)) << name;
    EXPECT_EQ(actual.at(name).scalar_type(), tensor.scalar_type()) << name;
  }
}

}  // namespace testing
}  // namespace fullshard

#endif  // FULLSHARD_TESTS_TRAIN_ODD_MODEL_H_
