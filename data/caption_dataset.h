#ifndef FULLSHARD_DATA_CAPTION_DATASET_H_
#define FULLSHARD_DATA_CAPTION_DATASET_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "fullshard/data/batch.h"
#include "fullshard/data/char_tokenizer.h"

namespace fullshard {

// Images with captions, held in memory.
class CaptionDataset {
 public:
  struct Augmentation {
    bool flip = false;  // Mirror every second image.
    int64_t shift = 0;  // Move by up to this many pixels, each way.
    uint64_t seed = 0;
  };

  // images: uint8 [examples, height, width]; one caption each.
  // Errors: kInvalidArgument if the numbers differ or a caption cannot be
  // encoded.
  static absl::StatusOr<CaptionDataset> create(
      at::Tensor images, std::vector<std::string> captions,
      std::shared_ptr<const CharTokenizer> tokenizer);

  int64_t num_examples() const { return images_.size(0); }
  const std::string& caption(int64_t example) const {
    return captions_[static_cast<size_t>(example)];
  }
  // uint8 [height, width].
  at::Tensor image(int64_t example) const { return images_.select(0, example); }
  const CharTokenizer& tokenizer() const { return *tokenizer_; }
  // Tokens of the longest caption with EOS.
  int64_t max_caption_tokens() const { return max_tokens_; }

  // float [examples, 1, height, width] from -1 to 1.
  at::Tensor pixels(const std::vector<int64_t>& examples) const;

  // [BOS] caption [EOS], padded on the right; labels ignore BOS and padding.
  VlmBatch batch(const std::vector<int64_t>& examples) const;

  // The same with images that are flipped and moved by chance. The chance
  // depends on seed, epoch and example alone: any rank would do the same.
  VlmBatch augmented_batch(const std::vector<int64_t>& examples, int64_t epoch,
                           const Augmentation& augmentation) const;

 private:
  CaptionDataset() = default;

  at::Tensor images_;
  std::vector<std::string> captions_;
  std::vector<std::vector<int64_t>> tokens_;  // Without BOS, with EOS.
  std::shared_ptr<const CharTokenizer> tokenizer_;
  int64_t max_tokens_ = 0;
};

}  // namespace fullshard

#endif  // FULLSHARD_DATA_CAPTION_DATASET_H_
