#include "fullshard/data/caption_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/tensor.h"

namespace fullshard {
namespace {

using testing::HasSubstr;

// Two images of 2x3 pixels, "ab" and "c": tokens a 3, b 4, c 5.
CaptionDataset small_dataset() {
  auto tokenizer = std::make_shared<const CharTokenizer>(
      std::vector<std::string>{"ab", "c"});
  return *CaptionDataset::create(
      at::arange(0, 12, at::kByte).mul(20).view({2, 2, 3}), {"ab", "c"},
      tokenizer);
}

at::Tensor longs(std::vector<int64_t> values, int64_t columns) {
  return at::tensor(values, at::kLong).view({-1, columns});
}

TEST(CaptionDatasetTest, BatchPadsOnTheRightAndIgnoresPaddingAndBos) {
  const VlmBatch batch = small_dataset().batch({1, 0});
  EXPECT_TRUE(batch.input_ids.equal(longs({1, 5, 2, 0, 1, 3, 4, 2}, 4)));
  EXPECT_TRUE(batch.labels.equal(longs({-100, 5, 2, -100, -100, 3, 4, 2}, 4)));
  EXPECT_TRUE(batch.attention_mask.to(at::kLong).equal(
      longs({1, 1, 1, 0, 1, 1, 1, 1}, 4)));
  EXPECT_TRUE(batch.multimodal_indices.equal(at::tensor({0, 1}, at::kLong)));
  EXPECT_EQ(batch.num_examples(), 2);
  EXPECT_EQ(batch.num_targets(), 5);
}

TEST(CaptionDatasetTest, PixelsGoFromMinusOneToOne) {
  auto tokenizer =
      std::make_shared<const CharTokenizer>(std::vector<std::string>{"a"});
  const CaptionDataset data = *CaptionDataset::create(
      at::tensor({0, 255}, at::kByte).view({1, 1, 2}), {"a"}, tokenizer);
  const at::Tensor pixels = data.pixels({0});
  EXPECT_EQ(pixels.sizes(), (std::vector<int64_t>{1, 1, 1, 2}));
  EXPECT_TRUE(pixels.equal(at::tensor({-1.f, 1.f}).view({1, 1, 1, 2})));
}

TEST(CaptionDatasetTest, LongestCaptionCountsItsEos) {
  EXPECT_EQ(small_dataset().max_caption_tokens(), 3);
}

TEST(CaptionDatasetTest, RefusesUnequalNumbersOfImagesAndCaptions) {
  auto tokenizer =
      std::make_shared<const CharTokenizer>(std::vector<std::string>{"a"});
  const absl::Status status =
      CaptionDataset::create(at::arange(0, 4, at::kByte).view({2, 1, 2}), {"a"},
                             tokenizer)
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("[1, height, width]"));
}

TEST(CaptionDatasetTest, WithoutAugmentationTheBatchIsThePlainOne) {
  const CaptionDataset data = small_dataset();
  const VlmBatch batch = data.augmented_batch({0, 1}, /*epoch=*/3, {});
  EXPECT_TRUE(batch.pixel_values.equal(data.pixels({0, 1})));
}

TEST(CaptionDatasetTest, FlipMirrorsSomeImagesAndOnlyMirrors) {
  const CaptionDataset data = small_dataset();
  const at::Tensor plain = data.pixels({0})[0], mirrored = plain.flip(2);
  int num_mirrored = 0;
  for (int64_t epoch = 0; epoch < 32; ++epoch) {
    const at::Tensor made =
        data.augmented_batch({0}, epoch, {/*flip=*/true, 0, /*seed=*/1})
            .pixel_values[0];
    const bool flipped = made.equal(mirrored);
    EXPECT_TRUE(flipped || made.equal(plain));
    num_mirrored += flipped ? 1 : 0;
  }
  EXPECT_GT(num_mirrored, 4);
  EXPECT_LT(num_mirrored, 28);
}

TEST(CaptionDatasetTest, ShiftFillsWithBlack) {
  const CaptionDataset data = small_dataset();
  const at::Tensor plain = data.pixels({1})[0][0];
  bool seen_move = false;
  for (int64_t epoch = 0; epoch < 32; ++epoch) {
    const at::Tensor made =
        data.augmented_batch({1}, epoch, {false, /*shift=*/1, /*seed=*/1})
            .pixel_values[0][0];
    if (made[0][0].item<float>() != -1) continue;
    if (!made.narrow(0, 1, 1).narrow(1, 1, 2).equal(
            plain.narrow(0, 0, 1).narrow(1, 0, 2))) {
      continue;
    }
    seen_move = true;  // Down and right by one.
  }
  EXPECT_TRUE(seen_move);
}

TEST(CaptionDatasetTest, AugmentationDoesNotDependOnTheBatch) {
  const CaptionDataset data = small_dataset();
  const CaptionDataset::Augmentation augmentation = {true, 1, 7};
  for (int64_t epoch = 0; epoch < 8; ++epoch) {
    const VlmBatch both = data.augmented_batch({0, 1}, epoch, augmentation);
    const VlmBatch alone = data.augmented_batch({1}, epoch, augmentation);
    EXPECT_TRUE(both.pixel_values[1].equal(alone.pixel_values[0]));
  }
}

}  // namespace
}  // namespace fullshard
