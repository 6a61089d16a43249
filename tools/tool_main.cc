#include "fullshard/tools/tool_main.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace fullshard {
namespace {

void on_bus_error(int) {
  constexpr char kMessage[] = "error: a file was cut short while it was read\n";
  (void)!::write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
  ::_exit(1);
}

}  // namespace

void explain_cut_files() { ::signal(SIGBUS, &on_bus_error); }

std::string user_file(const std::string& path) {
  const char* const folder = std::getenv("BUILD_WORKING_DIRECTORY");
  if (folder == nullptr || path.empty() || path[0] == '/') return path;
  return absl::StrCat(folder, "/", path);
}

int report(const absl::Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace fullshard
