#ifndef FULLSHARD_TESTS_TESTING_TINY_MODELS_H_
#define FULLSHARD_TESTS_TESTING_TINY_MODELS_H_

#include <string>
#include <vector>

#include "ATen/ops/gelu.h"
#include "ATen/ops/scaled_dot_product_attention.h"
#include "fullshard/activation_ckpt/checkpointable.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace fullshard {
namespace testing {

// A pre-norm transformer block of width d (d divisible by 2).
class TinyBlockImpl : public torch::nn::Module,
                      public Checkpointable<TinyBlockImpl> {
 public:
  explicit TinyBlockImpl(int64_t d) : d_(d) {
    norm1_ = register_module(
        "norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})));
    qkv_ = register_module("qkv", torch::nn::Linear(d, 3 * d));
    proj_ = register_module("proj", torch::nn::Linear(d, d));
    norm2_ = register_module(
        "norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})));
    // Odd on purpose: nothing divides evenly.
    up_ = register_module("up", torch::nn::Linear(d, 2 * d + 1));
    down_ = register_module("down", torch::nn::Linear(2 * d + 1, d));
  }

  at::Tensor forward(const at::Tensor& x) {
    return checkpointed(&TinyBlockImpl::run, x);
  }

 private:
  friend class Checkpointable<TinyBlockImpl>;

  at::Tensor run(const at::Tensor& input) {
    const int64_t batch = input.size(0), tokens = input.size(1);
    const auto parts = qkv_(norm1_(input))
                           .view({batch, tokens, 3, 2, d_ / 2})
                           .permute({2, 0, 3, 1, 4});
    const auto mixed =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0,
                                         /*is_causal=*/true)
            .transpose(1, 2)
            .reshape({batch, tokens, d_});
    const at::Tensor x = input + proj_(mixed);
    return x + down_(at::gelu(up_(norm2_(x))));
  }

  int64_t d_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, proj_{nullptr}, up_{nullptr}, down_{nullptr};
};

// Embedding, blocks, norm, head: tokens [batch, length] long to
// logits [batch, length, vocab].
class TinyTransformerImpl : public torch::nn::Module {
 public:
  TinyTransformerImpl(int64_t num_blocks, int64_t d, int64_t vocab) {
    embed_ = register_module("embed", torch::nn::Embedding(vocab, d));
    for (int64_t i = 0; i < num_blocks; ++i) {
      blocks_.push_back(register_module("block" + std::to_string(i),
                                        std::make_shared<TinyBlockImpl>(d)));
    }
    norm_ = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})));
    head_ = register_module("head", torch::nn::Linear(d, vocab));
  }

  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embed_(tokens);
    for (auto& block : blocks_) x = block->forward(x);
    return head_(norm_(x));
  }

 private:
  torch::nn::Embedding embed_{nullptr};
  std::vector<std::shared_ptr<TinyBlockImpl>> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};

}  // namespace testing
}  // namespace fullshard

#endif  // FULLSHARD_TESTS_TESTING_TINY_MODELS_H_
