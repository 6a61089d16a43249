#ifndef FULLSHARD_MODELS_PRISMATIC_H_
#define FULLSHARD_MODELS_PRISMATIC_H_

#include <memory>
#include <string>
#include <vector>

#include "fullshard/models/causal_decoder.h"
#include "fullshard/models/vision_language_model.h"
#include "fullshard/models/vision_transformer.h"

namespace fullshard {

struct PrismaticOptions {
  VisionTransformerOptions vision;
  CausalDecoderOptions decoder;
};

// Vision tower, MLP projector and causal decoder, put together as the Prismatic
// family does: the sequence is [BOS][patches][text]. Rows without an image
// are a batch of their own, [BOS][text]. As texts are padded on the right,
// causal attention never sees the padding.
//
// Names: vision_backbone.featurizer.*, projector.projector.{0,2},
// llm_backbone.llm.*.
class Prismatic final : public VisionLanguageModel {
 public:
  explicit Prismatic(const PrismaticOptions& options);

  // The stages that freeze_backbones knows.
  static const std::vector<std::string>& stages();

  std::vector<std::string> all_module_keys() const override;
  const std::vector<std::string>& trainable_module_keys() const override {
    return trainable_module_keys_;
  }
  absl::Status freeze_backbones(const std::string& stage) override;
  ModuleList unit_modules() override;
  ModuleList checkpoint_modules() override;
  std::shared_ptr<torch::nn::Module> vision_tower() override {
    return featurizer_;
  }
  bool vision_frozen() const override { return vision_frozen_; }

  LossTerms forward(const VlmBatch& batch) override;
  std::vector<std::vector<int64_t>> generate(const at::Tensor& pixel_values,
                                             int64_t max_new_tokens,
                                             int64_t bos, int64_t eos) override;

 private:
  // Patches as the decoder's inputs: [images, patches, width].
  at::Tensor project_patches(const at::Tensor& pixel_values);
  // Logits of the text positions, [rows, tokens, vocab]: position t says what
  // follows token t. Without patches where `patches` is undefined.
  at::Tensor text_logits(const at::Tensor& patches, const at::Tensor& ids);
  at::Tensor loss_sum(const at::Tensor& patches, const at::Tensor& input_ids,
                      const at::Tensor& labels);
  void set_trainable(bool vision, bool projector, bool llm, bool llm_ends);

  const PrismaticOptions options_;
  std::shared_ptr<VisionTransformerImpl> featurizer_;
  std::shared_ptr<torch::nn::Module> projector_;
  torch::nn::Linear projector_in_{nullptr}, projector_out_{nullptr};
  std::shared_ptr<CausalDecoderImpl> llm_;
  std::vector<std::string> trainable_module_keys_;
  bool vision_frozen_ = false;
};

}  // namespace fullshard

#endif  // FULLSHARD_MODELS_PRISMATIC_H_
