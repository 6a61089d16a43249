#include "fullshard/data/caption_dataset.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/arange.h"
#include "ATen/ops/constant_pad_nd.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"

namespace fullshard {
namespace {

// SplitMix64 (Steele et al., 2014): a hash good enough to draw from.
uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

absl::StatusOr<CaptionDataset> CaptionDataset::create(
    at::Tensor images, std::vector<std::string> captions,
    std::shared_ptr<const CharTokenizer> tokenizer) {
  if (images.dim() != 3 ||
      images.size(0) != static_cast<int64_t>(captions.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("caption data: expected images [", captions.size(),
                     ", height, width], got ", c10::str(images.sizes())));
  }
  CaptionDataset dataset;
  for (const std::string& caption : captions) {
    FS_ASSIGN_OR_RETURN(std::vector<int64_t> ids, tokenizer->encode(caption));
    ids.push_back(CharTokenizer::kEos);
    dataset.max_tokens_ =
        std::max(dataset.max_tokens_, static_cast<int64_t>(ids.size()));
    dataset.tokens_.push_back(std::move(ids));
  }
  dataset.images_ = std::move(images);
  dataset.captions_ = std::move(captions);
  dataset.tokenizer_ = std::move(tokenizer);
  return dataset;
}

at::Tensor CaptionDataset::pixels(const std::vector<int64_t>& examples) const {
  const int64_t height = images_.size(1), width = images_.size(2);
  at::Tensor pixels = at::empty(
      {static_cast<int64_t>(examples.size()), 1, height, width}, at::kFloat);
  for (size_t i = 0; i < examples.size(); ++i) {
    pixels[static_cast<int64_t>(i)][0].copy_(image(examples[i]));
  }
  return pixels.div_(127.5).sub_(1);
}

VlmBatch CaptionDataset::batch(const std::vector<int64_t>& examples) const {
  const int64_t rows = static_cast<int64_t>(examples.size());
  VlmBatch batch;
  batch.pixel_values = pixels(examples);
  batch.input_ids = at::full({rows, 1 + max_tokens_}, CharTokenizer::kPad,
                             at::TensorOptions().dtype(at::kLong));
  batch.labels = at::full({rows, 1 + max_tokens_}, kIgnoredLabel,
                          at::TensorOptions().dtype(at::kLong));
  batch.attention_mask = at::zeros({rows, 1 + max_tokens_}, at::kBool);
  batch.multimodal_indices = at::arange(rows, at::kLong);
  for (int64_t row = 0; row < rows; ++row) {
    const std::vector<int64_t>& ids =
        tokens_[static_cast<size_t>(examples[static_cast<size_t>(row)])];
    int64_t* inputs =
        batch.input_ids.data_ptr<int64_t>() + row * (1 + max_tokens_);
    int64_t* labels =
        batch.labels.data_ptr<int64_t>() + row * (1 + max_tokens_);
    inputs[0] = CharTokenizer::kBos;
    std::copy(ids.begin(), ids.end(), inputs + 1);
    std::copy(ids.begin(), ids.end(), labels + 1);
    batch.attention_mask[row]
        .narrow(0, 0, 1 + static_cast<int64_t>(ids.size()))
        .fill_(true);
  }
  return batch;
}

VlmBatch CaptionDataset::augmented_batch(
    const std::vector<int64_t>& examples, int64_t epoch,
    const Augmentation& augmentation) const {
  VlmBatch made = batch(examples);
  const int64_t shift = augmentation.shift;
  const int64_t height = images_.size(1), width = images_.size(2);
  const uint64_t span = static_cast<uint64_t>(2 * shift + 1);
  const at::Tensor padded = at::constant_pad_nd(
      made.pixel_values, {shift, shift, shift, shift}, /*value=*/-1);
  for (size_t i = 0; i < examples.size(); ++i) {
    const uint64_t chance =
        splitmix64(splitmix64(augmentation.seed ^
                              splitmix64(static_cast<uint64_t>(epoch))) ^
                   static_cast<uint64_t>(examples[i]));
    const int64_t down = static_cast<int64_t>((chance >> 8) % span);
    const int64_t right = static_cast<int64_t>((chance >> 24) % span);
    at::Tensor moved = padded[static_cast<int64_t>(i)]
                           .narrow(1, down, height)
                           .narrow(2, right, width);
    if (augmentation.flip && (chance & 1) != 0) moved = moved.flip(2);
    made.pixel_values[static_cast<int64_t>(i)].copy_(moved);
  }
  return made;
}

}  // namespace fullshard
