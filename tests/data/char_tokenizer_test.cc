#include "fullshard/data/char_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fullshard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(CharTokenizerTest, NumbersCharactersInByteOrderAfterSpecialTokens) {
  const CharTokenizer tokenizer({"cab", "a b"});
  EXPECT_EQ(tokenizer.vocab_size(), 3 + 4);
  EXPECT_THAT(*tokenizer.encode("b ac"), ElementsAre(5, 3, 4, 6));
}

TEST(CharTokenizerTest, DecodesWhatItEncoded) {
  const CharTokenizer tokenizer({"ankle boot", "t-shirt"});
  for (const char* text : {"ankle boot", "t-shirt", "", "boat"}) {
    EXPECT_EQ(tokenizer.decode(*tokenizer.encode(text)), text);
  }
}

TEST(CharTokenizerTest, DecodesSpecialAndUnknownTokensAsNothing) {
  const CharTokenizer tokenizer({"ab"});
  EXPECT_EQ(tokenizer.decode({CharTokenizer::kBos, 3, -1, 99, 4,
                              CharTokenizer::kEos, CharTokenizer::kPad}),
            "ab");
}

TEST(CharTokenizerTest, NamesACharacterItDoesNotHave) {
  const absl::Status status = CharTokenizer({"ab"}).encode("abz").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'z'"));
}

}  // namespace
}  // namespace fullshard
