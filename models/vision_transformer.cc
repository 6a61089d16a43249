#include "fullshard/models/vision_transformer.h"

#include "ATen/ops/gelu.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/scaled_dot_product_attention.h"
#include "fullshard/models/init.h"

namespace fullshard {
namespace {

torch::nn::LayerNorm layer_norm(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}).eps(1e-6));
}

}  // namespace

VisionBlockImpl::VisionBlockImpl(const VisionTransformerOptions& options)
    : heads_(options.heads) {
  const int64_t width = options.width;
  norm1_ = register_module("norm1", layer_norm(width));
  auto attn = register_module("attn", std::make_shared<torch::nn::Module>());
  qkv_ = attn->register_module("qkv", torch::nn::Linear(width, 3 * width));
  proj_ = attn->register_module("proj", torch::nn::Linear(width, width));
  norm2_ = register_module("norm2", layer_norm(width));
  auto mlp = register_module("mlp", std::make_shared<torch::nn::Module>());
  fc1_ =
      mlp->register_module("fc1", torch::nn::Linear(width, options.mlp_width));
  fc2_ =
      mlp->register_module("fc2", torch::nn::Linear(options.mlp_width, width));
  for (auto* linear : {&qkv_, &proj_, &fc1_, &fc2_}) init_linear(**linear);
}

at::Tensor VisionBlockImpl::forward(const at::Tensor& input) {
  const int64_t images = input.size(0), patches = input.size(1),
                width = input.size(2);
  const at::Tensor parts =
      qkv_(norm1_(input))
          .view({images, patches, 3, heads_, width / heads_})
          .permute({2, 0, 3, 1, 4});
  const at::Tensor mixed =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2])
          .transpose(1, 2)
          .reshape({images, patches, width});
  const at::Tensor x = input + proj_(mixed);
  return x + fc2_(at::gelu(fc1_(norm2_(x))));
}

VisionTransformerImpl::VisionTransformerImpl(
    const VisionTransformerOptions& options) {
  auto embed =
      register_module("patch_embed", std::make_shared<torch::nn::Module>());
  patch_embed_ = embed->register_module(
      "proj",
      torch::nn::Conv2d(torch::nn::Conv2dOptions(
                            options.channels, options.width, options.patch_size)
                            .stride(options.patch_size)));
  pos_embed_ = register_parameter(
      "pos_embed", at::randn({1, options.num_patches(), options.width}) * 0.02);
  auto blocks =
      register_module("blocks", std::make_shared<torch::nn::Module>());
  for (int64_t i = 0; i < options.depth; ++i) {
    blocks_.push_back(blocks->register_module(
        std::to_string(i), std::make_shared<VisionBlockImpl>(options)));
  }
  norm_ = register_module("norm", layer_norm(options.width));
}

at::Tensor VisionTransformerImpl::forward(const at::Tensor& pixels) {
  at::Tensor x = patch_embed_(pixels.to(patch_embed_->weight.scalar_type()))
                     .flatten(2)
                     .transpose(1, 2) +
                 pos_embed_;
  for (const auto& block : blocks_) x = block->forward(x);
  return norm_(x);
}

}  // namespace fullshard
