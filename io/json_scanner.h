#ifndef FULLSHARD_IO_JSON_SCANNER_H_
#define FULLSHARD_IO_JSON_SCANNER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fullshard {

// Walks JSON (RFC 8259) piece by piece and builds nothing, so that a large
// header costs no memory. White space before a piece is skipped.
//
// Lifetime: `text` outlives the scanner and every view it returns.
// Errors: DataLoss with the byte where something else was found.
class JsonScanner {
 public:
  explicit JsonScanner(absl::string_view text) : text_(text) {}

  // Skips `punctuation` and returns true, or stays and returns false.
  bool accept(char punctuation);
  absl::Status expect(char punctuation);

  // Returns a string as it stands between its quotes; see decode().
  absl::StatusOr<absl::string_view> string();
  // Returns an integer of 0 to 2^63 - 1, written without sign or exponent.
  absl::StatusOr<int64_t> integer();
  // Skips one value of any kind and returns its text.
  absl::StatusOr<absl::string_view> skip_value();
  // Fails unless only white space is left.
  absl::Status end();

  // Calls `entry(raw key)` at each value of an object; it consumes the value.
  template <class Entry>
  absl::Status object(Entry entry);

  size_t position() const { return position_; }

 private:
  absl::Status unexpected(absl::string_view wanted) const;
  void skip_space();
  char peek() const {
    return position_ < text_.size() ? text_[position_] : '\0';
  }

  absl::string_view text_;
  size_t position_ = 0;
};

// Resolves the escapes of a string that JsonScanner returned.
// Errors: DataLoss for what is no JSON string or not UTF-8.
absl::StatusOr<std::string> decode_json_string(absl::string_view raw);

// `text` as a JSON string, quotes and escapes included.
// Requires: is_utf8(text).
std::string json_string(absl::string_view text);

template <class Entry>
absl::Status JsonScanner::object(Entry entry) {
  if (absl::Status status = expect('{'); !status.ok()) return status;
  if (accept('}')) return absl::OkStatus();
  do {
    absl::StatusOr<absl::string_view> key = string();
    if (!key.ok()) return key.status();
    if (absl::Status status = expect(':'); !status.ok()) return status;
    if (absl::Status status = entry(*key); !status.ok()) return status;
  } while (accept(','));
  return expect('}');
}

}  // namespace fullshard

#endif  // FULLSHARD_IO_JSON_SCANNER_H_
