#ifndef FULLSHARD_TERMINAL_PROGRESS_LINE_H_
#define FULLSHARD_TERMINAL_PROGRESS_LINE_H_

#include <chrono>
#include <string>

namespace fullshard {

// One line that says how far a run is. On a terminal it is drawn over itself;
// elsewhere a plain line appears every few seconds.
class ProgressLine {
 public:
  // Writes to standard error. `seconds_between` applies to plain lines.
  explicit ProgressLine(double seconds_between = 10);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // Shows `text`; `last` shows it in any case and ends the line.
  void show(const std::string& text, bool last = false);

 private:
  const bool terminal_;
  const std::chrono::duration<double> between_;
  std::chrono::steady_clock::time_point shown_;
  bool open_ = false;  // A line is on the terminal without its end.
};

// "1:05" or "2:03:04".
std::string format_duration(double seconds);

}  // namespace fullshard

#endif  // FULLSHARD_TERMINAL_PROGRESS_LINE_H_
