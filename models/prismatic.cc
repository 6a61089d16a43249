#include "fullshard/models/prismatic.h"

#include <algorithm>

#include "ATen/ops/cat.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/full.h"
#include "ATen/ops/gelu.h"
#include "ATen/ops/ones.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "fullshard/models/init.h"

namespace fullshard {

Prismatic::Prismatic(const PrismaticOptions& options)
    : options_(options), trainable_module_keys_(all_module_keys()) {
  auto vision =
      register_module("vision_backbone", std::make_shared<torch::nn::Module>());
  featurizer_ = vision->register_module(
      "featurizer", std::make_shared<VisionTransformerImpl>(options.vision));
  projector_ =
      register_module("projector", std::make_shared<torch::nn::Module>());
  auto layers = projector_->register_module(
      "projector", std::make_shared<torch::nn::Module>());
  projector_in_ = layers->register_module(
      "0", torch::nn::Linear(options.vision.width, options.decoder.width));
  projector_out_ = layers->register_module(
      "2", torch::nn::Linear(options.decoder.width, options.decoder.width));
  init_linear(*projector_in_);
  init_linear(*projector_out_);
  auto llm =
      register_module("llm_backbone", std::make_shared<torch::nn::Module>());
  llm_ = llm->register_module(
      "llm", std::make_shared<CausalDecoderImpl>(options.decoder));
}

const std::vector<std::string>& Prismatic::stages() {
  static const auto* const stages =
      new std::vector<std::string>{"align",
                                   "finetune",
                                   "vla-train",
                                   "full-finetune",
                                   "vla-full-train",
                                   "last-layer-finetune",
                                   "vla-last-layer-train",
                                   "vla-sandwich-train"};
  return *stages;
}

std::vector<std::string> Prismatic::all_module_keys() const {
  return {"vision_backbone", "llm_backbone", "projector"};
}

absl::Status Prismatic::freeze_backbones(const std::string& stage) {
  if (stage == "align") {
    set_trainable(false, true, false, false);
    trainable_module_keys_ = {"projector"};
  } else if (stage == "finetune" || stage == "vla-train") {
    set_trainable(false, true, true, true);
    trainable_module_keys_ = {"projector", "llm_backbone"};
  } else if (stage == "full-finetune" || stage == "vla-full-train") {
    set_trainable(true, true, true, true);
    trainable_module_keys_ = {"vision_backbone", "projector", "llm_backbone"};
  } else if (stage == "last-layer-finetune" ||
             stage == "vla-last-layer-train") {
    set_trainable(false, false, false, true);
    trainable_module_keys_ = {"llm_backbone"};
  } else if (stage == "vla-sandwich-train") {
    set_trainable(true, true, false, true);
    trainable_module_keys_ = {"vision_backbone", "projector", "llm_backbone"};
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("stage: expected one of ", absl::StrJoin(stages(), ", "),
                     "; got '", stage, "'"));
  }
  return absl::OkStatus();
}

void Prismatic::set_trainable(bool vision, bool projector, bool llm,
                              bool llm_ends) {
  auto set = [](const torch::nn::Module& module, bool value) {
    for (const at::Tensor& p : module.parameters()) p.set_requires_grad(value);
  };
  vision_frozen_ = !vision;
  set(*featurizer_, vision);
  featurizer_->train(vision);
  set(*projector_, projector);
  set(*llm_, llm);
  if (llm || !llm_ends) return;
  set(*llm_->embed_tokens(), true);
  set(*llm_->layers().back(), true);
  set(*llm_->lm_head(), true);
}

ModuleList Prismatic::unit_modules() {
  ModuleList units;
  for (const auto& block : featurizer_->blocks()) units.push_back(block);
  units.push_back(featurizer_);
  for (const auto& layer : llm_->layers()) units.push_back(layer);
  units.push_back(projector_);
  return units;
}

ModuleList Prismatic::checkpoint_modules() {
  return ModuleList(llm_->layers().begin(), llm_->layers().end());
}

at::Tensor Prismatic::project_patches(const at::Tensor& pixel_values) {
  at::Tensor features;
  {
    // A frozen tower needs no graph.
    at::AutoGradMode grad(at::GradMode::is_enabled() && !vision_frozen_);
    features = featurizer_->forward(pixel_values);
  }
  features = features.to(projector_in_->weight.scalar_type());
  return projector_out_(at::gelu(projector_in_(features)));
}

at::Tensor Prismatic::text_logits(const at::Tensor& patches,
                                  const at::Tensor& ids) {
  const at::Tensor embedded = llm_->embed(ids);
  if (!patches.defined()) return llm_->forward(embedded);
  const int64_t tokens = ids.size(1), num_patches = patches.size(1);
  const at::Tensor inputs =
      at::cat({embedded.narrow(1, 0, 1), patches.to(embedded.scalar_type()),
               embedded.narrow(1, 1, tokens - 1)},
              1);
  // The last patch stands in for BOS: it is what the first text token follows.
  return llm_->forward(inputs).narrow(1, num_patches, tokens);
}

at::Tensor Prismatic::loss_sum(const at::Tensor& patches,
                               const at::Tensor& input_ids,
                               const at::Tensor& labels) {
  // What follows the last token is not asked for.
  const int64_t targets = input_ids.size(1) - 1;
  const at::Tensor logits =
      text_logits(patches, input_ids.narrow(1, 0, targets));
  return at::cross_entropy_loss(
      logits.reshape({-1, logits.size(-1)}).to(at::kFloat),
      labels.narrow(1, 1, targets).reshape({-1}), /*weight=*/{},
      at::Reduction::Sum, kIgnoredLabel);
}

LossTerms Prismatic::forward(const VlmBatch& batch) {
  const at::Tensor& with_image = batch.multimodal_indices;
  LossTerms terms;
  terms.num_targets = batch.num_targets();
  if (with_image.size(0) == batch.num_examples()) {
    terms.loss_sum = loss_sum(project_patches(batch.pixel_values),
                              batch.input_ids, batch.labels);
    return terms;
  }
  const at::Tensor is_text =
      at::ones({batch.num_examples()}, with_image.options().dtype(at::kBool))
          .index_fill_(0, with_image, 0);
  const at::Tensor text = is_text.nonzero().flatten();
  terms.loss_sum = loss_sum({}, batch.input_ids.index_select(0, text),
                            batch.labels.index_select(0, text));
  if (with_image.size(0) > 0) {
    terms.loss_sum =
        terms.loss_sum +
        loss_sum(
            project_patches(batch.pixel_values.index_select(0, with_image)),
            batch.input_ids.index_select(0, with_image),
            batch.labels.index_select(0, with_image));
  }
  return terms;
}

std::vector<std::vector<int64_t>> Prismatic::generate(
    const at::Tensor& pixel_values, int64_t max_new_tokens, int64_t bos,
    int64_t eos) {
  at::NoGradGuard no_grad;
  const at::Tensor patches = project_patches(pixel_values);
  at::Tensor ids = at::full({pixel_values.size(0), 1}, bos,
                            pixel_values.options().dtype(at::kLong));
  for (int64_t i = 0; i < max_new_tokens; ++i) {
    const at::Tensor logits = text_logits(patches, ids);
    const at::Tensor next =
        logits.select(1, logits.size(1) - 1).argmax(-1, /*keepdim=*/true);
    ids = at::cat({ids, next}, 1);
  }
  ids = ids.cpu().contiguous();
  std::vector<std::vector<int64_t>> captions;
  for (int64_t row = 0; row < ids.size(0); ++row) {
    const int64_t* begin = ids.const_data_ptr<int64_t>() + row * ids.size(1);
    captions.emplace_back(begin + 1,
                          std::find(begin + 1, begin + ids.size(1), eos));
  }
  return captions;
}

}  // namespace fullshard
