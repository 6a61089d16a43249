#ifndef FULLSHARD_TOOLS_TOOL_MAIN_H_
#define FULLSHARD_TOOLS_TOOL_MAIN_H_

#include <string>

#include "absl/status/status.h"

namespace fullshard {

// Ends the process with one readable line, instead of a bus error, when a file
// is cut short while it is read.
void explain_cut_files();

// `path` as the user who called `bazel run` means it.
std::string user_file(const std::string& path);

// Prints a failure as one line; returns the exit status.
int report(const absl::Status& status);

}  // namespace fullshard

#endif  // FULLSHARD_TOOLS_TOOL_MAIN_H_
