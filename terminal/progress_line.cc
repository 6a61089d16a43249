#include "fullshard/terminal/progress_line.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "absl/strings/str_format.h"

namespace fullshard {

ProgressLine::ProgressLine(double seconds_between)
    : terminal_(isatty(STDERR_FILENO) != 0),
      between_(terminal_ ? 0.1 : seconds_between) {}

ProgressLine::~ProgressLine() {
  if (open_) std::fputc('\n', stderr);
}

void ProgressLine::show(const std::string& text, bool last) {
  const auto now = std::chrono::steady_clock::now();
  if (!last && now - shown_ < between_) return;
  shown_ = now;
  if (terminal_) {
    std::fprintf(stderr, "\r%s\033[K%s", text.c_str(), last ? "\n" : "");
    open_ = !last;
  } else {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
  std::fflush(stderr);
}

std::string format_duration(double seconds) {
  const int64_t whole = std::llround(std::max(0.0, seconds));
  const int64_t hours = whole / 3600, minutes = whole / 60 % 60;
  if (hours > 0) {
    return absl::StrFormat("%d:%02d:%02d", hours, minutes, whole % 60);
  }
  return absl::StrFormat("%d:%02d", minutes, whole % 60);
}

}  // namespace fullshard
