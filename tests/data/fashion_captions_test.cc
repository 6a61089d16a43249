#include "fullshard/data/fashion_captions.h"

#include <gtest/gtest.h>

#include <map>

#include "ATen/ops/sum.h"

namespace fullshard {
namespace {

std::map<std::string, int> count_captions(const CaptionDataset& data) {
  std::map<std::string, int> counts;
  for (int64_t i = 0; i < data.num_examples(); ++i) ++counts[data.caption(i)];
  return counts;
}

TEST(FashionCaptionsTest, HasBalancedClassesOfWholeImages) {
  const absl::StatusOr<FashionCaptions> data = load_fashion_captions();
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->training.num_examples(), 4096);
  EXPECT_EQ(data->held_out.num_examples(), 1000);
  EXPECT_EQ(data->training.image(0).sizes(), (std::vector<int64_t>{28, 28}));
  const auto trained = count_captions(data->training);
  EXPECT_EQ(trained.size(), 10u);
  for (const auto& [caption, count] : trained) EXPECT_NEAR(count, 409, 1);
  for (const auto& [caption, count] : count_captions(data->held_out)) {
    EXPECT_EQ(count, 100) << caption;
    EXPECT_EQ(trained.count(caption), 1u) << caption;
  }
}

// The first image of Fashion-MNIST's training file is an ankle boot whose
// pixels sum to 76,247.
TEST(FashionCaptionsTest, KeepsTheOriginalOrderAndPixels) {
  const FashionCaptions data = *load_fashion_captions();
  EXPECT_EQ(data.training.caption(0), "ankle boot");
  EXPECT_EQ(data.training.image(0).sum().item<int64_t>(), 76247);
  EXPECT_EQ(data.held_out.caption(0), "ankle boot");
}

TEST(FashionCaptionsTest, SplitsShareOneTokenizer) {
  const FashionCaptions data = *load_fashion_captions();
  EXPECT_EQ(&data.training.tokenizer(), &data.held_out.tokenizer());
  EXPECT_EQ(data.training.max_caption_tokens(), 11);
}

}  // namespace
}  // namespace fullshard
