// Prints what sharding a model would cost, for any number of ranks, without
// starting one.

#include "fullshard/sharding/plan.h"

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/checkpoint_reader.h"
#include "fullshard/tools/plan_checkpoint.h"
#include "fullshard/tools/tool_main.h"
#include "fullshard/train_config.h"
#include "fullshard/train_job.h"

ABSL_FLAG(int, nproc, 8, "ranks of the job");
ABSL_FLAG(int, shard_group_size, 0, "ranks that share one copy; 0: all");
ABSL_FLAG(std::string, strategy, "full-shard",
          "full-shard, shard-grad-op or no-shard");
ABSL_FLAG(std::string, storage_dtype, "",
          "master shards: fp32, bf16, fp16; empty: as in the checkpoint");
ABSL_FLAG(std::string, param_dtype, "", "fp32, bf16, fp16; empty: as stored");
ABSL_FLAG(std::string, reduce_dtype, "",
          "fp32, bf16, fp16; empty: as param_dtype");
ABSL_FLAG(int, optimizer_states, 2, "tensors per parameter; AdamW keeps 2");
ABSL_FLAG(std::string, unit, "",
          "regular expression that matches a unit's name at the beginning of a "
          "parameter's; empty: up to the first number");
ABSL_FLAG(std::string, config, "",
          "plan the model of this //:train config, not a checkpoint");

namespace fullshard {
namespace {

constexpr char kUsage[] =
    "plan [--nproc=N] [flags] CHECKPOINT | plan --config=train.yaml "
    "[--nproc=N]\n\nCHECKPOINT is a .pt or .safetensors file, an index, or a "
    "folder that holds them; only names and shapes are read.";

absl::StatusOr<std::optional<at::ScalarType>> dtype_flag(
    const char* flag, const std::string& value) {
  if (value.empty()) return std::optional<at::ScalarType>();
  if (value == "fp32") return std::optional<at::ScalarType>(at::kFloat);
  if (value == "bf16") return std::optional<at::ScalarType>(at::kBFloat16);
  if (value == "fp16") return std::optional<at::ScalarType>(at::kHalf);
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag, ": expected fp32, bf16 or fp16, got '", value, "'"));
}

absl::StatusOr<ShardingStrategy> strategy_flag() {
  const std::string value = absl::GetFlag(FLAGS_strategy);
  if (value == "full-shard") return ShardingStrategy::kHybridShard;
  if (value == "shard-grad-op") return ShardingStrategy::kHybridShardZero2;
  if (value == "no-shard") return ShardingStrategy::kNoShard;
  return absl::InvalidArgumentError(
      absl::StrCat("--strategy: expected full-shard, shard-grad-op or "
                   "no-shard, got '",
                   value, "'"));
}

// Returns the size of a shard group.
absl::StatusOr<int> shards_flag() {
  const int ranks = absl::GetFlag(FLAGS_nproc);
  if (ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--nproc: expected at least 1, got ", ranks));
  }
  const int given = absl::GetFlag(FLAGS_shard_group_size);
  const int shards = given == 0 ? ranks : given;
  if (shards < 1 || ranks % shards != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--shard_group_size: expected a divisor of the ", ranks,
                     " ranks of --nproc, got ", given));
  }
  return shards;
}

absl::StatusOr<Plan> plan_of_checkpoint(const std::string& path) {
  PlanOptions options;
  FS_ASSIGN_OR_RETURN(options.num_shards, shards_flag());
  options.num_replicas = absl::GetFlag(FLAGS_nproc) / options.num_shards;
  FS_ASSIGN_OR_RETURN(options.strategy, strategy_flag());
  FS_ASSIGN_OR_RETURN(
      options.param_dtype,
      dtype_flag("param_dtype", absl::GetFlag(FLAGS_param_dtype)));
  FS_ASSIGN_OR_RETURN(
      options.reduce_dtype,
      dtype_flag("reduce_dtype", absl::GetFlag(FLAGS_reduce_dtype)));
  FS_ASSIGN_OR_RETURN(
      const auto storage_dtype,
      dtype_flag("storage_dtype", absl::GetFlag(FLAGS_storage_dtype)));
  options.optimizer_states = absl::GetFlag(FLAGS_optimizer_states);
  std::optional<std::string> pattern;
  if (!absl::GetFlag(FLAGS_unit).empty()) pattern = absl::GetFlag(FLAGS_unit);
  FS_ASSIGN_OR_RETURN(const auto checkpoint, open_checkpoint(path));
  FS_ASSIGN_OR_RETURN(const std::vector<PlanUnit> units,
                      units_of_checkpoint(*checkpoint, pattern, storage_dtype));
  return make_plan(units, options);
}

absl::StatusOr<Plan> plan_of_config(const std::string& file) {
  FS_ASSIGN_OR_RETURN(const int shards, shards_flag());
  FS_ASSIGN_OR_RETURN(const TrainConfig config,
                      parse_train_config({absl::StrCat("--config=", file)}));
  return plan_train_job(config, absl::GetFlag(FLAGS_nproc), shards);
}

int print(const absl::StatusOr<Plan>& plan) {
  if (!plan.ok()) return report(plan.status());
  std::fputs(plan->table().c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace fullshard

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(fullshard::kUsage);
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  const std::string config = absl::GetFlag(FLAGS_config);
  if (arguments.size() != (config.empty() ? 2 : 1)) {
    std::fprintf(stderr, "usage: %s\n", fullshard::kUsage);
    return 2;
  }
  fullshard::explain_cut_files();
  return fullshard::print(
      config.empty()
          ? fullshard::plan_of_checkpoint(fullshard::user_file(arguments[1]))
          : fullshard::plan_of_config(config));
}
