#ifndef FULLSHARD_CORE_LOGGING_H_
#define FULLSHARD_CORE_LOGGING_H_

#include "absl/strings/string_view.h"

namespace fullshard {

// Names this process in every later log line. A world of one rank gets no
// prefix. Call once per process, before the first collective.
void set_log_rank(int rank, int world_size);

// Writes one line to standard error, as "[rank 2] message" when there are
// several ranks. A line is one write, so lines of ranks never interleave.
void log_info(absl::string_view message);
void log_warning(absl::string_view message);
void log_error(absl::string_view message);

}  // namespace fullshard

#endif  // FULLSHARD_CORE_LOGGING_H_
