#ifndef FULLSHARD_BENCHMARKS_TINY_GPT_H_
#define FULLSHARD_BENCHMARKS_TINY_GPT_H_

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/gelu.h"
#include "ATen/ops/scaled_dot_product_attention.h"
#include "c10/core/GradMode.h"
#include "fullshard/activation_ckpt/checkpointable.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace fullshard {
namespace benchmarks {

// A GPT whose weights and data follow from hashes, so that PyTorch's and ours
// can be compared loss by loss; pytorch_peer.py has the same.
struct TinyGptOptions {
  int64_t layers = 12;
  int64_t width = 256;
  int64_t heads = 8;
  int64_t vocab = 1024;
  int64_t tokens = 64;  // Of one sample; the batch of a rank is one sample.
};

inline uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

inline uint64_t fnv1a(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001B3;
  return hash;
}

class TinyBlockImpl : public torch::nn::Module,
                      public Checkpointable<TinyBlockImpl> {
 public:
  explicit TinyBlockImpl(const TinyGptOptions& options)
      : heads_(options.heads) {
    const int64_t d = options.width;
    auto norm = [d] {
      return torch::nn::LayerNorm(torch::nn::LayerNormOptions({d}));
    };
    ln1_ = register_module("ln1", norm());
    ln2_ = register_module("ln2", norm());
    qkv_ = register_module("qkv", torch::nn::Linear(d, 3 * d));
    proj_ = register_module("proj", torch::nn::Linear(d, d));
    up_ = register_module("up", torch::nn::Linear(d, 4 * d));
    down_ = register_module("down", torch::nn::Linear(4 * d, d));
  }
  at::Tensor forward(const at::Tensor& x) {
    return checkpointed(&TinyBlockImpl::run, x);
  }

 private:
  friend class Checkpointable<TinyBlockImpl>;
  at::Tensor run(const at::Tensor& input) {
    const int64_t b = input.size(0), t = input.size(1), d = input.size(2);
    const at::Tensor z = qkv_(ln1_(input))
                             .view({b, t, 3, heads_, d / heads_})
                             .permute({2, 0, 3, 1, 4});
    const at::Tensor y = at::scaled_dot_product_attention(
        z[0], z[1], z[2], {}, 0.0, /*is_causal=*/true);
    const at::Tensor x = input + proj_(y.transpose(1, 2).reshape({b, t, d}));
    return x + down_(at::gelu(up_(ln2_(x))));
  }

  const int64_t heads_;
  torch::nn::LayerNorm ln1_{nullptr}, ln2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, proj_{nullptr}, up_{nullptr}, down_{nullptr};
};

class TinyGptImpl : public torch::nn::Module {
 public:
  explicit TinyGptImpl(const TinyGptOptions& options) {
    tok_ = register_module("tok",
                           torch::nn::Embedding(options.vocab, options.width));
    pos_ = register_module("pos",
                           torch::nn::Embedding(options.tokens, options.width));
    auto blocks =
        register_module("blocks", std::make_shared<torch::nn::Module>());
    for (int64_t i = 0; i < options.layers; ++i) {
      blocks_.push_back(blocks->register_module(
          std::to_string(i), std::make_shared<TinyBlockImpl>(options)));
    }
    ln_f_ = register_module(
        "ln_f",
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
    head_ = register_module(
        "head",
        torch::nn::Linear(torch::nn::LinearOptions(options.width, options.vocab)
                              .bias(false)));
    init();
  }

  // tokens, targets: long [batch, tokens]; returns the mean loss.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    at::Tensor x = tok_(tokens) + pos_(at::arange(tokens.size(1), at::kLong));
    for (const auto& block : blocks_) x = block->forward(x);
    const at::Tensor logits = head_(ln_f_(x)).to(at::kFloat);
    return at::cross_entropy_loss(logits.view({-1, logits.size(-1)}),
                                  targets.view({-1}));
  }

 private:
  // Matrices: (2u - 1) 0.02 sqrt(3), u the top 24 bits of
  // splitmix64(fnv1a(name) + i) / 2^24. Norms one, biases zero.
  void init() {
    at::NoGradGuard no_grad;
    const float scale = static_cast<float>(0.02 * std::sqrt(3.0));
    for (auto& item : named_parameters()) {
      at::Tensor& p = item.value();
      const std::string& name = item.key();
      if (p.dim() == 1) {
        const bool norm_weight =
            name.find("ln") != std::string::npos && name.size() > 6 &&
            name.compare(name.size() - 6, 6, "weight") == 0;
        p.fill_(norm_weight ? 1 : 0);
        continue;
      }
      const uint64_t base = fnv1a(name);
      float* values = p.data_ptr<float>();
      for (int64_t i = 0; i < p.numel(); ++i) {
        const float u = static_cast<float>(
                            splitmix64(base + static_cast<uint64_t>(i)) >> 40) *
                        0x1p-24f;
        values[i] = (2.0f * u - 1.0f) * scale;
      }
    }
  }

  torch::nn::Embedding tok_{nullptr}, pos_{nullptr};
  std::vector<std::shared_ptr<TinyBlockImpl>> blocks_;
  torch::nn::LayerNorm ln_f_{nullptr};
  torch::nn::Linear head_{nullptr};
};

// Tokens and targets of a rank at a step: an arithmetic progression modulo the
// vocabulary, its start and stride from a hash.
inline std::pair<at::Tensor, at::Tensor> tiny_gpt_batch(
    const TinyGptOptions& options, int64_t step, int rank, int world_size) {
  const uint64_t hash =
      splitmix64(static_cast<uint64_t>(step * world_size + rank));
  const int64_t start =
      static_cast<int64_t>(hash % static_cast<uint64_t>(options.vocab));
  const int64_t stride = 1 + static_cast<int64_t>((hash >> 32) % 7);
  at::Tensor all = at::empty({1, options.tokens + 1}, at::kLong);
  for (int64_t i = 0; i <= options.tokens; ++i) {
    all.data_ptr<int64_t>()[i] = (start + i * stride) % options.vocab;
  }
  return {all.narrow(1, 0, options.tokens).contiguous(),
          all.narrow(1, 1, options.tokens).contiguous()};
}

}  // namespace benchmarks
}  // namespace fullshard

#endif  // FULLSHARD_BENCHMARKS_TINY_GPT_H_
