#ifndef FULLSHARD_TRAIN_CONFIG_H_
#define FULLSHARD_TRAIN_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/strategy.h"

namespace fullshard {

// Everything that //:train can be told, by flag or in a YAML file.
struct TrainConfig {
  // The defaults are those of the preset fashion-captions.
  TrainConfig();

  StrategyConfig strategy;
  std::string data = "fashion-captions";
  int64_t nproc = 2;
  std::string backend;                // See ProcessGroupsOptions.
  std::string pretrained_checkpoint;  // Modules to start from.
  std::string resume;  // A run's folder or checkpoint to go on from.
  std::string run_root_dir = "runs";
  std::string run_id;       // Default: made from stage and time.
  int64_t show_images = 8;  // Held-out images drawn; 0: none.
};

// Reads command line arguments: --config=FILE and --key=value, the later one
// winning, and files before flags. `--key` alone means true. --resume=FOLDER
// starts from that run's own settings, and goes on in its folder.
//
// Errors: kInvalidArgument for an unknown key (names the nearest), a value of
// the wrong kind, or a file that is no flat YAML map; says where.
absl::StatusOr<TrainConfig> parse_train_config(
    const std::vector<std::string>& arguments);

// The text of --help: every key with its default.
std::string train_config_help();

std::string to_yaml(const TrainConfig& config);
std::string to_json(const TrainConfig& config);

// Returns `path` as the user who called `bazel run` means it: relative to
// BUILD_WORKING_DIRECTORY, where that is set.
std::string user_path(const std::string& path);

}  // namespace fullshard

#endif  // FULLSHARD_TRAIN_CONFIG_H_
