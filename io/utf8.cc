#include "fullshard/io/utf8.h"

#include <cstddef>

namespace fullshard {

bool is_utf8(absl::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80    ? 1
                          : lead < 0xc2  ? 0
                          : lead < 0xe0  ? 2
                          : lead < 0xf0  ? 3
                          : lead <= 0xf4 ? 4
                                         : 0;
    if (length == 0 || i + length > text.size()) return false;
    for (size_t k = 1; k < length; ++k) {
      if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) {
        return false;
      }
    }
    const auto second =
        static_cast<unsigned char>(length > 1 ? text[i + 1] : 0);
    if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
        (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f)) {
      return false;
    }
    i += length;
  }
  return true;
}

}  // namespace fullshard
