#include "fullshard/io/json_scanner.h"

#include <limits>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/utf8.h"
#include "nlohmann/json.hpp"

namespace fullshard {
namespace {

constexpr size_t kMaxDepth = 64;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

absl::Status JsonScanner::unexpected(absl::string_view wanted) const {
  return absl::DataLossError(
      absl::StrCat("malformed JSON: expected ", wanted, " at byte ", position_,
                   position_ < text_.size() ? "" : ", where it ends"));
}

void JsonScanner::skip_space() {
  while (position_ < text_.size() && (peek() == ' ' || peek() == '\n' ||
                                      peek() == '\t' || peek() == '\r')) {
    ++position_;
  }
}

bool JsonScanner::accept(char punctuation) {
  skip_space();
  if (position_ >= text_.size() || peek() != punctuation) return false;
  ++position_;
  return true;
}

absl::Status JsonScanner::expect(char punctuation) {
  if (accept(punctuation)) return absl::OkStatus();
  return unexpected(absl::StrCat("'", absl::string_view(&punctuation, 1), "'"));
}

absl::StatusOr<absl::string_view> JsonScanner::string() {
  FS_RETURN_IF_ERROR(expect('"'));
  const size_t start = position_;
  while (position_ < text_.size() && peek() != '"') {
    if (static_cast<unsigned char>(peek()) < 0x20) {
      return unexpected("no control character in a string");
    }
    position_ += peek() == '\\' ? 2 : 1;
  }
  if (position_ >= text_.size()) {
    position_ = text_.size();
    return unexpected("the end of a string");
  }
  return text_.substr(start, position_++ - start);
}

absl::StatusOr<int64_t> JsonScanner::integer() {
  skip_space();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const size_t start = position_;
  int64_t value = 0;
  for (; is_digit(peek()); ++position_) {
    const int64_t digit = peek() - '0';
    if (value > (kMax - digit) / 10) return unexpected("at most 63 bits");
    value = 10 * value + digit;
  }
  const bool leading_zero = position_ - start > 1 && text_[start] == '0';
  if (position_ == start || leading_zero || peek() == '.' || peek() == 'e' ||
      peek() == 'E') {
    return unexpected("an integer");
  }
  return value;
}

absl::StatusOr<absl::string_view> JsonScanner::skip_value() {
  skip_space();
  const size_t start = position_;
  std::string open;  // the brackets that are open
  do {
    skip_space();
    const char c = peek();
    if (c == '"') {
      FS_RETURN_IF_ERROR(string().status());
    } else if (c == '{' || c == '[') {
      if (open.size() >= kMaxDepth) return unexpected("less nesting");
      open.push_back(c == '{' ? '}' : ']');
      ++position_;
    } else if (!open.empty() && c == open.back()) {
      open.pop_back();
      ++position_;
    } else if (!open.empty() && (c == ',' || c == ':')) {
      ++position_;
    } else {
      const size_t before = position_;
      while (is_digit(peek()) || (peek() >= 'a' && peek() <= 'z') ||
             peek() == 'E' || peek() == '+' || peek() == '-' || peek() == '.') {
        ++position_;
      }
      if (position_ == before) return unexpected("a value");
    }
  } while (!open.empty());
  return text_.substr(start, position_ - start);
}

absl::Status JsonScanner::end() {
  skip_space();
  return position_ == text_.size() ? absl::OkStatus() : unexpected("its end");
}

absl::StatusOr<std::string> decode_json_string(absl::string_view raw) {
  if (!is_utf8(raw)) {
    return absl::DataLossError("malformed JSON: a string is not UTF-8");
  }
  if (raw.find('\\') == absl::string_view::npos) return std::string(raw);
  const std::string quoted = absl::StrCat("\"", raw, "\"");
  const auto value =
      nlohmann::json::parse(quoted, nullptr, /*allow_exceptions=*/false);
  if (!value.is_string()) {
    return absl::DataLossError("malformed JSON: a string has a bad escape");
  }
  return value.get<std::string>();
}

std::string json_string(absl::string_view text) {
  return nlohmann::json(std::string(text)).dump();
}

}  // namespace fullshard
