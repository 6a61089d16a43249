#ifndef FULLSHARD_DATA_CHAR_TOKENIZER_H_
#define FULLSHARD_DATA_CHAR_TOKENIZER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace fullshard {

// One token per character of a fixed alphabet, after three special ones.
class CharTokenizer {
 public:
  static constexpr int64_t kPad = 0;
  static constexpr int64_t kBos = 1;
  static constexpr int64_t kEos = 2;

  // The alphabet is every character of `texts`, in byte order.
  explicit CharTokenizer(const std::vector<std::string>& texts);

  int64_t vocab_size() const {
    return kNumSpecial + static_cast<int64_t>(alphabet_.size());
  }

  // Errors: kInvalidArgument naming a character outside the alphabet.
  absl::StatusOr<std::vector<int64_t>> encode(const std::string& text) const;

  // Special tokens and unknown ids become nothing.
  std::string decode(const std::vector<int64_t>& ids) const;

 private:
  static constexpr int64_t kNumSpecial = 3;

  std::string alphabet_;
};

}  // namespace fullshard

#endif  // FULLSHARD_DATA_CHAR_TOKENIZER_H_
