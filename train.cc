// The training program: settings, ranks, and one line if something is wrong.

#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "fullshard/core/launch_env.h"
#include "fullshard/core/launcher.h"
#include "fullshard/core/logging.h"
#include "fullshard/train_config.h"
#include "fullshard/train_job.h"

namespace {

int fail(const absl::Status& status) {
  fullshard::log_error(status.message());
  return 1;
}

int run_rank(const fullshard::TrainConfig& config,
             const fullshard::LaunchEnv& env) {
  const absl::Status status = fullshard::run_train_job(config, env);
  // Rank 0 says why: every rank finds the same mistake in settings and files.
  if (env.rank != 0 &&
      (absl::IsAborted(status) || absl::IsInvalidArgument(status) ||
       absl::IsNotFound(status))) {
    return 1;
  }
  return status.ok() ? 0 : fail(status);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  for (const std::string& argument : arguments) {
    if (argument == "--help" || argument == "-h") {
      std::fputs(fullshard::train_config_help().c_str(), stdout);
      return 0;
    }
  }
  absl::StatusOr<fullshard::TrainConfig> config =
      fullshard::parse_train_config(arguments);
  if (!config.ok()) return fail(config.status());
  const absl::StatusOr<fullshard::LaunchEnv> env =
      fullshard::LaunchEnv::from_environment();
  if (!env.ok()) return fail(env.status());
  if (config->run_id.empty()) {
    // Under torchrun the ranks must agree: one second is too fine for them.
    config->run_id =
        absl::StrCat(config->data, "+", config->strategy.stage,
                     absl::FormatTime("+%Y-%m-%d-%H-%M", absl::Now(),
                                      absl::LocalTimeZone()));
  }
  if (env->launched) return run_rank(*config, *env);
  fullshard::LauncherOptions options;
  options.num_ranks = static_cast<int>(config->nproc);
  return fullshard::launch_ranks(options, [&](const fullshard::LaunchEnv& e) {
    return run_rank(*config, e);
  });
}
