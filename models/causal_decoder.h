#ifndef FULLSHARD_MODELS_CAUSAL_DECODER_H_
#define FULLSHARD_MODELS_CAUSAL_DECODER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "fullshard/activation_ckpt/checkpointable.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {

struct CausalDecoderOptions {
  int64_t vocab_size = 32;
  int64_t width = 64;
  int64_t depth = 2;
  int64_t heads = 4;
  int64_t mlp_width = 128;
  double norm_eps = 1e-6;
  double rope_theta = 10000;
};

// Root-mean-square norm (Zhang and Sennrich, 2019).
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t width, double eps);
  at::Tensor forward(const at::Tensor& x);

 private:
  const double eps_;
  at::Tensor weight_;
};

// A decoder layer with the names of Hugging Face's Llama:
// self_attn.{q,k,v,o}_proj, mlp.{gate,up,down}_proj, input_layernorm,
// post_attention_layernorm. Rotary positions (Su et al., 2021).
class DecoderLayerImpl : public torch::nn::Module,
                         public Checkpointable<DecoderLayerImpl> {
 public:
  explicit DecoderLayerImpl(const CausalDecoderOptions& options);
  // x: [rows, tokens, width]; cos, sin: [tokens, width / heads].
  at::Tensor forward(const at::Tensor& x, const at::Tensor& cos,
                     const at::Tensor& sin);

 private:
  friend class Checkpointable<DecoderLayerImpl>;
  at::Tensor run(const at::Tensor& x, const at::Tensor& cos,
                 const at::Tensor& sin);

  const int64_t heads_;
  std::shared_ptr<RmsNormImpl> input_layernorm_, post_attention_layernorm_;
  torch::nn::Linear q_proj_{nullptr}, k_proj_{nullptr}, v_proj_{nullptr},
      o_proj_{nullptr};
  torch::nn::Linear gate_proj_{nullptr}, up_proj_{nullptr}, down_proj_{nullptr};
};

// A causal language model with the names of Hugging Face's Llama:
// model.embed_tokens, model.layers.N, model.norm, lm_head.
class CausalDecoderImpl : public torch::nn::Module {
 public:
  explicit CausalDecoderImpl(const CausalDecoderOptions& options);

  // ids: long [rows, tokens]; returns [rows, tokens, width].
  at::Tensor embed(const at::Tensor& ids);
  // inputs: [rows, tokens, width]; returns logits [rows, tokens, vocab].
  at::Tensor forward(const at::Tensor& inputs);

  const std::vector<std::shared_ptr<DecoderLayerImpl>>& layers() const {
    return layers_;
  }
  const torch::nn::Embedding& embed_tokens() const { return embed_tokens_; }
  const torch::nn::Linear& lm_head() const { return lm_head_; }

 private:
  const CausalDecoderOptions options_;
  torch::nn::Embedding embed_tokens_{nullptr};
  std::vector<std::shared_ptr<DecoderLayerImpl>> layers_;
  std::shared_ptr<RmsNormImpl> norm_;
  torch::nn::Linear lm_head_{nullptr};
};

}  // namespace fullshard

#endif  // FULLSHARD_MODELS_CAUSAL_DECODER_H_
