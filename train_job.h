#ifndef FULLSHARD_TRAIN_JOB_H_
#define FULLSHARD_TRAIN_JOB_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/core/launch_env.h"
#include "fullshard/sharding/plan.h"
#include "fullshard/train_config.h"

namespace fullshard {

// Runs one rank of the training program: connects, builds data and model,
// trains, scores, and reports on rank 0. SIGINT and SIGTERM end training after
// the current step, with a checkpoint.
//
// Collective. Errors: one line for the user.
absl::Status run_train_job(const TrainConfig& config, const LaunchEnv& env);

// Returns what sharding the program's model costs over `num_ranks` ranks, of
// which `num_shards` share a copy; there is only this process.
absl::StatusOr<Plan> plan_train_job(const TrainConfig& config, int num_ranks,
                                    int num_shards);

}  // namespace fullshard

#endif  // FULLSHARD_TRAIN_JOB_H_
