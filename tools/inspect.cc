// Lists what a checkpoint holds and runs nothing of it.

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "fullshard/io/checkpoint_reader.h"
#include "fullshard/tools/checkpoint_listing.h"
#include "fullshard/tools/tool_main.h"

ABSL_FLAG(bool, json, false, "print one JSON object per checkpoint");

int main(int argc, char** argv) {
  using namespace fullshard;  // NOLINT: a main
  absl::SetProgramUsageMessage(
      "inspect [--json] CHECKPOINT...\n\nCHECKPOINT is a .pt or .safetensors "
      "file, an index, or a folder that holds them.");
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  if (arguments.size() < 2) {
    std::fprintf(stderr, "usage: %.*s\n",
                 static_cast<int>(absl::ProgramUsageMessage().size()),
                 absl::ProgramUsageMessage().data());
    return 2;
  }
  explain_cut_files();
  int status = 0;
  for (size_t i = 1; i < arguments.size(); ++i) {
    const auto checkpoint = open_checkpoint(user_file(arguments[i]));
    if (!checkpoint.ok()) {
      status = report(checkpoint.status());
      continue;
    }
    const std::string text = absl::GetFlag(FLAGS_json)
                                 ? checkpoint_json(**checkpoint)
                                 : checkpoint_table(**checkpoint);
    std::fwrite(text.data(), 1, text.size(), stdout);
  }
  return status;
}
