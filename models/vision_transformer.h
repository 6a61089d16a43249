#ifndef FULLSHARD_MODELS_VISION_TRANSFORMER_H_
#define FULLSHARD_MODELS_VISION_TRANSFORMER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace fullshard {

struct VisionTransformerOptions {
  int64_t image_size = 28;
  int64_t patch_size = 7;
  int64_t channels = 1;
  int64_t width = 64;
  int64_t depth = 3;
  int64_t heads = 4;
  int64_t mlp_width = 256;

  int64_t num_patches() const {
    return (image_size / patch_size) * (image_size / patch_size);
  }
};

// A pre-norm block with timm's names: norm1, attn.{qkv,proj}, norm2,
// mlp.{fc1,fc2}.
class VisionBlockImpl : public torch::nn::Module {
 public:
  explicit VisionBlockImpl(const VisionTransformerOptions& options);
  // x: [images, patches, width].
  at::Tensor forward(const at::Tensor& x);

 private:
  const int64_t heads_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, proj_{nullptr}, fc1_{nullptr}, fc2_{nullptr};
};

// A vision transformer without class token (Dosovitskiy et al., 2021), with
// timm's names: patch_embed.proj, pos_embed, blocks.N, norm.
class VisionTransformerImpl : public torch::nn::Module {
 public:
  explicit VisionTransformerImpl(const VisionTransformerOptions& options);
  // pixels: [images, channels, size, size]; returns [images, patches, width].
  at::Tensor forward(const at::Tensor& pixels);

  const std::vector<std::shared_ptr<VisionBlockImpl>>& blocks() const {
    return blocks_;
  }

 private:
  torch::nn::Conv2d patch_embed_{nullptr};
  at::Tensor pos_embed_;
  std::vector<std::shared_ptr<VisionBlockImpl>> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
};

}  // namespace fullshard

#endif  // FULLSHARD_MODELS_VISION_TRANSFORMER_H_
