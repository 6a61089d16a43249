// Writes a checkpoint in another format, and with other names.

#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/statusor.h"
#include "fullshard/core/status.h"
#include "fullshard/tools/checkpoint_listing.h"
#include "fullshard/tools/convert_checkpoint.h"
#include "fullshard/tools/key_map.h"
#include "fullshard/tools/tool_main.h"

ABSL_FLAG(std::string, from, "",
          "key style of the input: prismatic, openvla, llm or vision; empty: "
          "what its names show");
ABSL_FLAG(std::string, to, "",
          "key style of the output; empty: names stay as they are");
ABSL_FLAG(std::string, fused_tower, "siglip",
          "what Prismatic calls the second vision tower: siglip or clip");
ABSL_FLAG(int64_t, max_shard_bytes, 5'000'000'000,
          "most bytes of tensors in one file of a folder");

namespace fullshard {
namespace {

constexpr char kUsage[] =
    "convert [flags] INPUT OUTPUT\n\nINPUT is a .pt or .safetensors file, an "
    "index, or a folder that holds them. OUTPUT's name tells its format: .pt, "
    ".pth and .bin are .pt files, .safetensors is one safetensors file, .dcp "
    "and step-<n> are sharded checkpoints, anything else is a new Hugging Face "
    "folder.";

absl::StatusOr<ConvertOptions> options_from_flags() {
  ConvertOptions options;
  if (const std::string from = absl::GetFlag(FLAGS_from); !from.empty()) {
    FS_ASSIGN_OR_RETURN(options.from, parse_key_style(from));
  }
  if (const std::string to = absl::GetFlag(FLAGS_to); !to.empty()) {
    FS_ASSIGN_OR_RETURN(options.to, parse_key_style(to));
  }
  options.fused_tower = absl::GetFlag(FLAGS_fused_tower);
  if (options.fused_tower != "siglip" && options.fused_tower != "clip") {
    return absl::InvalidArgumentError("--fused_tower is \"" +
                                      options.fused_tower +
                                      "\", expected siglip or clip");
  }
  options.max_shard_bytes = absl::GetFlag(FLAGS_max_shard_bytes);
  return options;
}

absl::Status convert(const std::string& input, const std::string& output) {
  FS_ASSIGN_OR_RETURN(const ConvertOptions options, options_from_flags());
  FS_ASSIGN_OR_RETURN(const ConvertReport done,
                      convert_checkpoint(input, output, options));
  std::printf("%s (%s): %zu tensors, %s, from %s (%s)\n", output.c_str(),
              done.output_format.c_str(), done.num_tensors,
              readable_bytes(done.num_bytes).c_str(), input.c_str(),
              done.input_format.c_str());
  if (done.from.has_value()) {
    std::printf("keys: %s -> %s\n",
                std::string(key_style_name(*done.from)).c_str(),
                std::string(key_style_name(*options.to)).c_str());
  }
  for (const std::string& name : done.copied_files) {
    std::printf("copied %s\n", name.c_str());
  }
  for (const std::string& what : done.left_out) {
    std::printf("left out: %s\n", what.c_str());
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace fullshard

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(fullshard::kUsage);
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  if (arguments.size() != 3) {
    std::fprintf(stderr, "usage: %s\n", fullshard::kUsage);
    return 2;
  }
  fullshard::explain_cut_files();
  return fullshard::report(fullshard::convert(
      fullshard::user_file(arguments[1]), fullshard::user_file(arguments[2])));
}
