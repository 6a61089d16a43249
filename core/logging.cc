#include "fullshard/core/logging.h"

#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace fullshard {
namespace {

int g_rank = 0;
int g_world_size = 1;

void write_line(absl::string_view severity, absl::string_view message) {
  std::string line;
  if (g_world_size > 1) absl::StrAppend(&line, "[rank ", g_rank, "] ");
  absl::StrAppend(&line, severity, message, "\n");
  for (size_t done = 0; done < line.size();) {
    const ssize_t n =
        write(STDERR_FILENO, line.data() + done, line.size() - done);
    if (n <= 0) return;  // Nobody reads standard error any more.
    done += static_cast<size_t>(n);
  }
}

}  // namespace

void set_log_rank(int rank, int world_size) {
  g_rank = rank;
  g_world_size = world_size;
}

void log_info(absl::string_view message) { write_line("", message); }
void log_warning(absl::string_view message) {
  write_line("warning: ", message);
}
void log_error(absl::string_view message) { write_line("error: ", message); }

}  // namespace fullshard
