#include "fullshard/data/char_tokenizer.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"

namespace fullshard {

CharTokenizer::CharTokenizer(const std::vector<std::string>& texts) {
  std::set<char> characters;
  for (const std::string& text : texts) {
    characters.insert(text.begin(), text.end());
  }
  alphabet_.assign(characters.begin(), characters.end());
}

absl::StatusOr<std::vector<int64_t>> CharTokenizer::encode(
    const std::string& text) const {
  std::vector<int64_t> ids;
  for (char c : text) {
    const size_t at = alphabet_.find(c);
    if (at == std::string::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat("caption '", text, "': the tokenizer has no character '",
                       std::string(1, c), "'"));
    }
    ids.push_back(kNumSpecial + static_cast<int64_t>(at));
  }
  return ids;
}

std::string CharTokenizer::decode(const std::vector<int64_t>& ids) const {
  std::string text;
  for (int64_t id : ids) {
    const int64_t at = id - kNumSpecial;
    if (at >= 0 && at < static_cast<int64_t>(alphabet_.size())) {
      text += alphabet_[static_cast<size_t>(at)];
    }
  }
  return text;
}

}  // namespace fullshard
