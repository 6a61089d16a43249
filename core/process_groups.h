#ifndef FULLSHARD_CORE_PROCESS_GROUPS_H_
#define FULLSHARD_CORE_PROCESS_GROUPS_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "fullshard/core/launch_env.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace fullshard {

class ShmBackend;

struct ProcessGroupsOptions {
  // "shm": shared memory, the ranks of one host. "gloo": TCP, CPU hosts.
  // "shm+gloo": shared memory for groups inside one host, Gloo for the others.
  // "nccl": GPUs; needs a build with --config=cuda. "single": a world of one.
  // "fake": no peers at all, see fake_backend.h; world and rank as `env` says.
  // "": nccl where this build and host have it, single for a world of one, shm
  // when all ranks are on this host, else shm+gloo.
  //
  // Gloo listens at the address by which this host reaches MASTER_ADDR, or on
  // the interface that GLOO_SOCKET_IFNAME names.
  std::string backend;

  // How long a rank waits for another before the job fails.
  std::chrono::milliseconds timeout{300000};

  // Ranks that share one copy of the model: consecutive ranks form a shard
  // group, ranks with the same place in theirs a replicate group. 0: all ranks.
  // Must divide the world size.
  int shard_group_size = 0;

  // Ranks of a shard group over which a unit stays split between forward and
  // backward, see ShardOptions; consecutive. 0: no such groups. Must divide the
  // size of the shard group.
  int reshard_group_size = 0;
};

// The communicators of a job: all ranks, this rank's shard group and its
// replicate group. A handle: copies share the groups, which close with the last
// copy. Close it before main() returns.
class ProcessGroups {
 public:
  using Group = c10::intrusive_ptr<c10d::Backend>;

  // Wraps existing groups, for backends of one's own. Most callers want
  // init_process_groups().
  ProcessGroups(const LaunchEnv& env, const std::string& backend,
                c10::Device device, Group world, Group shard_group,
                Group replicate_group, Group reshard_group = {});

  int rank() const;
  int world_size() const;
  int local_rank() const;
  const LaunchEnv& env() const;
  // Where this rank computes.
  c10::Device device() const;
  // One of the names in ProcessGroupsOptions.
  const std::string& backend() const;

  // The shard group is the world itself unless shard_group_size says otherwise;
  // a replicate group of one rank is "single".
  const Group& world() const;
  const Group& shard_group() const;
  const Group& replicate_group() const;
  // Null without reshard_group_size, or if that is the whole shard group.
  const Group& reshard_group() const;

  // Returns `group` as shared memory, or null if it is something else.
  static ShmBackend* shm(const Group& group);

 private:
  friend absl::StatusOr<ProcessGroups> init_process_groups(
      const LaunchEnv& env, const ProcessGroupsOptions& options);
  struct State;
  explicit ProcessGroups(std::shared_ptr<State> state);

  std::shared_ptr<State> state_;
};

// Connects all ranks of the job. Over Gloo or NCCL, SIGPIPE is ignored from
// then on, unless the program handles it.
//
// Collective: all ranks, with equal options.
// Errors: InvalidArgument for an unknown backend or a shard group that does not
// divide the world; FailedPrecondition for a backend that this build or host
// cannot have; DeadlineExceeded or Unavailable naming ranks that did not come.
absl::StatusOr<ProcessGroups> init_process_groups(
    const LaunchEnv& env, const ProcessGroupsOptions& options = {});

// The same, from a fallible environment: init_process_groups(
// LaunchEnv::from_environment()).
absl::StatusOr<ProcessGroups> init_process_groups(
    const absl::StatusOr<LaunchEnv>& env,
    const ProcessGroupsOptions& options = {});

}  // namespace fullshard

#endif  // FULLSHARD_CORE_PROCESS_GROUPS_H_
