#include "fullshard/models/causal_decoder.h"

#include <utility>

#include "ATen/ops/arange.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/outer.h"
#include "ATen/ops/pow.h"
#include "ATen/ops/rms_norm.h"
#include "ATen/ops/scaled_dot_product_attention.h"
#include "ATen/ops/silu.h"
#include "fullshard/models/init.h"

namespace fullshard {
namespace {

torch::nn::Linear linear(torch::nn::Module& parent, const char* name,
                         int64_t in, int64_t out) {
  torch::nn::Linear made = parent.register_module(
      name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  init_linear(*made);
  return made;
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin) {
  const int64_t half = x.size(-1) / 2;
  return x * cos +
         at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1) * sin;
}

}  // namespace

RmsNormImpl::RmsNormImpl(int64_t width, double eps)
    : eps_(eps), weight_(register_parameter("weight", at::ones({width}))) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  return at::rms_norm(x, {x.size(-1)}, weight_.to(x.scalar_type()), eps_);
}

DecoderLayerImpl::DecoderLayerImpl(const CausalDecoderOptions& options)
    : heads_(options.heads) {
  const int64_t width = options.width;
  auto attention =
      register_module("self_attn", std::make_shared<torch::nn::Module>());
  q_proj_ = linear(*attention, "q_proj", width, width);
  k_proj_ = linear(*attention, "k_proj", width, width);
  v_proj_ = linear(*attention, "v_proj", width, width);
  o_proj_ = linear(*attention, "o_proj", width, width);
  auto mlp = register_module("mlp", std::make_shared<torch::nn::Module>());
  gate_proj_ = linear(*mlp, "gate_proj", width, options.mlp_width);
  up_proj_ = linear(*mlp, "up_proj", width, options.mlp_width);
  down_proj_ = linear(*mlp, "down_proj", options.mlp_width, width);
  input_layernorm_ =
      register_module("input_layernorm",
                      std::make_shared<RmsNormImpl>(width, options.norm_eps));
  post_attention_layernorm_ =
      register_module("post_attention_layernorm",
                      std::make_shared<RmsNormImpl>(width, options.norm_eps));
}

at::Tensor DecoderLayerImpl::forward(const at::Tensor& x, const at::Tensor& cos,
                                     const at::Tensor& sin) {
  return checkpointed(&DecoderLayerImpl::run, x, cos, sin);
}

at::Tensor DecoderLayerImpl::run(const at::Tensor& input, const at::Tensor& cos,
                                 const at::Tensor& sin) {
  const int64_t rows = input.size(0), tokens = input.size(1),
                width = input.size(2);
  auto heads = [&](torch::nn::Linear& proj, const at::Tensor& x) {
    return proj(x).view({rows, tokens, heads_, width / heads_}).transpose(1, 2);
  };
  const at::Tensor h = input_layernorm_->forward(input);
  const at::Tensor mixed =
      at::scaled_dot_product_attention(rotate(heads(q_proj_, h), cos, sin),
                                       rotate(heads(k_proj_, h), cos, sin),
                                       heads(v_proj_, h), {}, 0.0,
                                       /*is_causal=*/true)
          .transpose(1, 2)
          .reshape({rows, tokens, width});
  const at::Tensor x = input + o_proj_(mixed);
  const at::Tensor m = post_attention_layernorm_->forward(x);
  return x + down_proj_(at::silu(gate_proj_(m)) * up_proj_(m));
}

CausalDecoderImpl::CausalDecoderImpl(const CausalDecoderOptions& options)
    : options_(options) {
  at::NoGradGuard no_grad;
  auto model = register_module("model", std::make_shared<torch::nn::Module>());
  embed_tokens_ = model->register_module(
      "embed_tokens", torch::nn::Embedding(options.vocab_size, options.width));
  embed_tokens_->weight.normal_(0, 0.02);
  auto layers =
      model->register_module("layers", std::make_shared<torch::nn::Module>());
  for (int64_t i = 0; i < options.depth; ++i) {
    layers_.push_back(layers->register_module(
        std::to_string(i), std::make_shared<DecoderLayerImpl>(options)));
  }
  norm_ = model->register_module(
      "norm", std::make_shared<RmsNormImpl>(options.width, options.norm_eps));
  lm_head_ = linear(*this, "lm_head", options.width, options.vocab_size);
  lm_head_->weight.normal_(0, 0.02);
}

at::Tensor CausalDecoderImpl::embed(const at::Tensor& ids) {
  return embed_tokens_(ids);
}

at::Tensor CausalDecoderImpl::forward(const at::Tensor& inputs) {
  const int64_t head_width = options_.width / options_.heads;
  const at::Tensor exponents =
      at::arange(0, head_width, 2, inputs.options().dtype(at::kFloat)) /
      static_cast<double>(head_width);
  const at::Tensor angles =
      at::outer(at::arange(inputs.size(1), exponents.options()),
                at::pow(options_.rope_theta, -exponents));
  const at::Tensor both = at::cat({angles, angles}, -1);
  const at::Tensor cos = both.cos().to(inputs.scalar_type());
  const at::Tensor sin = both.sin().to(inputs.scalar_type());
  at::Tensor x = inputs;
  for (const auto& layer : layers_) x = layer->forward(x, cos, sin);
  return lm_head_(norm_->forward(x));
}

}  // namespace fullshard
