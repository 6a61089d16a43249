#include "fullshard/terminal/draw_images.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace fullshard {
namespace {

constexpr int kGap = 2;
constexpr char kDensity[] = " .:-=+*#%@";

int shade(const at::Tensor& image, int64_t row, int64_t column) {
  if (row >= image.size(0)) return 0;
  return image.const_data_ptr<uint8_t>()[row * image.size(1) + column];
}

// A character stands for two pixels, one above the other.
void draw_row(const at::Tensor& image, int64_t row, bool color,
              std::string& out) {
  for (int64_t column = 0; column < image.size(1); ++column) {
    const int top = shade(image, 2 * row, column);
    const int bottom = shade(image, 2 * row + 1, column);
    if (color) {
      absl::StrAppendFormat(&out,
                            "\033[38;2;%d;%d;%dm\033[48;2;%d;%d;%dm\u2580", top,
                            top, top, bottom, bottom, bottom);
    } else {
      const int mean = (top + bottom) / 2;
      out += kDensity[mean * (static_cast<int>(sizeof(kDensity)) - 2) / 255];
    }
  }
  if (color) out += "\033[0m";
}

std::string fit(const std::string& text, size_t width) {
  std::string fitted = text.substr(0, width);
  fitted.resize(width, ' ');
  return fitted;
}

void draw_group(const std::vector<CaptionedImage>& images, size_t begin,
                size_t end, bool color, std::string& out) {
  int64_t rows = 0;
  size_t num_lines = 0;
  for (size_t i = begin; i < end; ++i) {
    rows = std::max(rows, (images[i].image.size(0) + 1) / 2);
    num_lines = std::max(num_lines, images[i].lines.size());
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (size_t i = begin; i < end; ++i) {
      draw_row(images[i].image, row, color, out);
      out.append(kGap, ' ');
    }
    out += "\n";
  }
  for (size_t line = 0; line < num_lines; ++line) {
    for (size_t i = begin; i < end; ++i) {
      const std::string text =
          line < images[i].lines.size() ? images[i].lines[line] : "";
      out += fit(text, static_cast<size_t>(images[i].image.size(1)));
      out.append(kGap, ' ');
    }
    out += "\n";
  }
}

}  // namespace

std::string draw_images(const std::vector<CaptionedImage>& images, bool color,
                        int columns) {
  std::string out;
  if (images.empty()) return out;
  const int width = static_cast<int>(images[0].image.size(1)) + kGap;
  const size_t per_row =
      static_cast<size_t>(std::max(1, (columns + kGap) / width));
  for (size_t begin = 0; begin < images.size(); begin += per_row) {
    draw_group(images, begin, std::min(begin + per_row, images.size()), color,
               out);
    out += "\n";
  }
  return out;
}

std::string draw_images(const std::vector<CaptionedImage>& images) {
  winsize size = {};
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  int columns = 80;
  if (terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 &&
      size.ws_col > 0) {
    columns = size.ws_col;
  }
  return draw_images(images, terminal, columns);
}

}  // namespace fullshard
