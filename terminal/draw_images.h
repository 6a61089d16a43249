#ifndef FULLSHARD_TERMINAL_DRAW_IMAGES_H_
#define FULLSHARD_TERMINAL_DRAW_IMAGES_H_

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace fullshard {

struct CaptionedImage {
  at::Tensor image;                // uint8 [height, width].
  std::vector<std::string> lines;  // Below it; as long as it is wide.
};

// Draws images side by side: with `color` as half blocks in shades of grey,
// two pixels to a character, else as characters of growing density. Rows are
// broken at `columns` characters.
std::string draw_images(const std::vector<CaptionedImage>& images, bool color,
                        int columns);

// Draws to standard output as it is: colour and width of the terminal, or
// plain characters in 80 columns.
std::string draw_images(const std::vector<CaptionedImage>& images);

}  // namespace fullshard

#endif  // FULLSHARD_TERMINAL_DRAW_IMAGES_H_
