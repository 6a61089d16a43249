#include "fullshard/terminal/draw_images.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ATen/ops/full.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/str_split.h"

namespace fullshard {
namespace {

at::Tensor gray(int value, int64_t height, int64_t width) {
  return at::full({height, width}, value, at::TensorOptions().dtype(at::kByte));
}

std::vector<std::string> lines_of(const std::string& text) {
  return absl::StrSplit(text, '\n');
}

TEST(DrawImagesTest, NothingGivesNothing) {
  EXPECT_EQ(draw_images({}, /*color=*/false, /*columns=*/80), "");
}

TEST(DrawImagesTest, PlainCharactersGrowDenserWithBrightness) {
  const at::Tensor image =
      at::tensor({0, 128, 255, 0, 128, 255}, at::kByte).view({2, 3});
  EXPECT_EQ(draw_images({{image, {}}}, false, 80), " =@  \n\n");
}

TEST(DrawImagesTest, AnOddLastRowIsHalfBlack) {
  const at::Tensor image = gray(255, 3, 1);
  EXPECT_EQ(draw_images({{image, {}}}, false, 80), "@  \n=  \n\n");
}

TEST(DrawImagesTest, ColourPutsTwoPixelsInOneHalfBlock) {
  const at::Tensor image = at::tensor({7, 250}, at::kByte).view({2, 1});
  EXPECT_EQ(draw_images({{image, {}}}, true, 80),
            "\033[38;2;7;7;7m\033[48;2;250;250;250m\u2580\033[0m  \n\n");
}

TEST(DrawImagesTest, ImagesStandSideBySideWithTheirLinesBelow) {
  const std::string drawn = draw_images(
      {{gray(0, 4, 6), {"coat", "right"}}, {gray(255, 4, 6), {"dress"}}}, false,
      80);
  EXPECT_EQ(lines_of(drawn),
            (std::vector<std::string>{"        @@@@@@  ", "        @@@@@@  ",
                                      "coat    dress   ", "right           ",
                                      "", ""}));
}

TEST(DrawImagesTest, LongLinesAreCutAtTheImagesWidth) {
  const std::string drawn =
      draw_images({{gray(0, 2, 4), {"ankle boot"}}}, false, 80);
  EXPECT_EQ(lines_of(drawn)[1], "ankl  ");
}

TEST(DrawImagesTest, RowsBreakAtTheTerminalsWidth) {
  const std::vector<CaptionedImage> images(5, {gray(255, 2, 8), {"x"}});
  for (const int columns : {1, 8, 17, 18, 28, 80}) {
    size_t widest = 0, drawn_images = 0;
    for (std::string line : lines_of(draw_images(images, false, columns))) {
      line.erase(line.find_last_not_of(' ') + 1);
      widest = std::max(widest, line.size());
      drawn_images +=
          static_cast<size_t>(std::count(line.begin(), line.end(), 'x'));
    }
    EXPECT_LE(widest, static_cast<size_t>(std::max(8, columns))) << columns;
    EXPECT_EQ(drawn_images, images.size()) << columns;
  }
}

}  // namespace
}  // namespace fullshard
