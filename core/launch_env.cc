#include "fullshard/core/launch_env.h"

#include <fcntl.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "fullshard/core/status.h"

namespace fullshard {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

absl::StatusOr<int> read_int(const char* name, int low, int high) {
  if (!is_set(name)) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " is not set; expected a number from ", low, " to ", high));
  }
  const char* text = std::getenv(name);
  int value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < low || value > high) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": expected a number from ", low, " to ", high,
                     ", got '", text, "'"));
  }
  return value;
}

absl::Status read_local_ranks(LaunchEnv& env) {
  if (is_set("LOCAL_WORLD_SIZE") || is_set("LOCAL_RANK")) {
    FS_ASSIGN_OR_RETURN(env.local_world_size,
                        read_int("LOCAL_WORLD_SIZE", 1, env.world_size));
    FS_ASSIGN_OR_RETURN(env.local_rank,
                        read_int("LOCAL_RANK", 0, env.local_world_size - 1));
  } else if (!env.rendezvous.empty() || is_loopback(env.master_addr)) {
    env.local_world_size = env.world_size;
    env.local_rank = env.rank;
  }
  if (env.single_host() && env.local_rank != env.rank) {
    return absl::InvalidArgumentError(absl::StrCat(
        "LOCAL_RANK: expected ", env.rank, " (RANK, as all ", env.world_size,
        " ranks are on this host), got ", env.local_rank));
  }
  return absl::OkStatus();
}

absl::Status read_master(LaunchEnv& env) {
  if (is_set("MASTER_ADDR")) env.master_addr = std::getenv("MASTER_ADDR");
  if (is_set("MASTER_PORT")) {
    FS_ASSIGN_OR_RETURN(env.master_port, read_int("MASTER_PORT", 0, 65535));
  }
  return absl::OkStatus();
}

absl::Status read_torchrun(LaunchEnv& env) {
  env.launched = true;
  if (is_set("TORCHELASTIC_USE_AGENT_STORE")) {
    env.launcher_serves_store = absl::EqualsIgnoreCase(
        std::getenv("TORCHELASTIC_USE_AGENT_STORE"), "true");
  }
  FS_RETURN_IF_ERROR(read_master(env));
  FS_ASSIGN_OR_RETURN(env.world_size, read_int("WORLD_SIZE", 1, kMaxInt));
  FS_ASSIGN_OR_RETURN(env.rank, read_int("RANK", 0, env.world_size - 1));
  FS_RETURN_IF_ERROR(read_local_ranks(env));
  if (env.rank == 0 && is_set("FULLSHARD_MASTER_FD")) {
    FS_ASSIGN_OR_RETURN(int fd, read_int("FULLSHARD_MASTER_FD", 0, kMaxInt));
    // A process that a rank started may have the variable but not the socket.
    if (fcntl(fd, F_GETFD) >= 0) env.master_listen_fd = fd;
  }
  return absl::OkStatus();
}

absl::Status read_open_mpi(LaunchEnv& env) {
  env.launched = true;
  FS_RETURN_IF_ERROR(read_master(env));
  FS_ASSIGN_OR_RETURN(env.world_size,
                      read_int("OMPI_COMM_WORLD_SIZE", 1, kMaxInt));
  FS_ASSIGN_OR_RETURN(env.rank,
                      read_int("OMPI_COMM_WORLD_RANK", 0, env.world_size - 1));
  FS_ASSIGN_OR_RETURN(
      env.local_world_size,
      read_int("OMPI_COMM_WORLD_LOCAL_SIZE", 1, env.world_size));
  FS_ASSIGN_OR_RETURN(env.local_rank, read_int("OMPI_COMM_WORLD_LOCAL_RANK", 0,
                                               env.local_world_size - 1));
  if (!env.single_host() && !is_set("MASTER_ADDR")) {
    return absl::InvalidArgumentError(
        "MASTER_ADDR is not set; expected the host of rank 0, as the job has "
        "ranks on several hosts (mpirun -x MASTER_ADDR -x MASTER_PORT)");
  }
  if (env.rendezvous.empty() && is_set("PMIX_NAMESPACE")) {
    env.rendezvous = absl::StrCat("mpi-", std::getenv("PMIX_NAMESPACE"));
  }
  return absl::OkStatus();
}

// Returns the first host of Slurm's list, as in "node[03-05,9]-ib,login".
std::string first_host(absl::string_view hosts) {
  const size_t end = hosts.find_first_of(",[");
  std::string name(hosts.substr(0, end));
  if (end == hosts.npos || hosts[end] == ',') return name;
  const size_t close = hosts.find(']', end);
  if (close == hosts.npos) return name;
  const absl::string_view numbers = hosts.substr(end + 1, close - end - 1);
  const absl::string_view suffix = hosts.substr(close + 1);
  return absl::StrCat(name, numbers.substr(0, numbers.find_first_of("-,")),
                      suffix.substr(0, suffix.find(',')));
}

// Returns how many tasks host number `node` runs, from a list like "4(x2),1".
absl::StatusOr<int> tasks_of_host(int node) {
  constexpr char kName[] = "SLURM_STEP_TASKS_PER_NODE";
  const std::string list = is_set(kName) ? std::getenv(kName) : "";
  int host = 0;
  for (absl::string_view part : absl::StrSplit(list, ',')) {
    int tasks = 0, hosts = 1;
    const std::vector<absl::string_view> fields =
        absl::StrSplit(part, absl::ByAnyChar("(x)"), absl::SkipEmpty());
    const bool good = !fields.empty() && fields.size() <= 2 &&
                      absl::SimpleAtoi(fields[0], &tasks) && tasks > 0 &&
                      (fields.size() == 1 ||
                       (absl::SimpleAtoi(fields[1], &hosts) && hosts > 0));
    if (!good) break;
    if (node - host < hosts) return tasks;
    host += hosts;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      kName, ": expected the tasks of each host, like 4(x2),1, with host ",
      node, " (SLURM_NODEID), got '", list, "'"));
}

absl::Status read_slurm(LaunchEnv& env) {
  FS_ASSIGN_OR_RETURN(const int world,
                      read_int("SLURM_STEP_NUM_TASKS", 1, kMaxInt));
  // A shell that srun started is no rank of a job.
  if (world == 1) return read_master(env);
  env.launched = true;
  env.world_size = world;
  FS_ASSIGN_OR_RETURN(env.rank, read_int("SLURM_PROCID", 0, world - 1));
  FS_ASSIGN_OR_RETURN(const int node, read_int("SLURM_NODEID", 0, kMaxInt - 1));
  FS_ASSIGN_OR_RETURN(env.local_world_size, tasks_of_host(node));
  if (env.local_world_size > world) {
    return absl::InvalidArgumentError(absl::StrCat(
        "SLURM_STEP_TASKS_PER_NODE: expected at most the ", world,
        " tasks of SLURM_STEP_NUM_TASKS, got ", env.local_world_size));
  }
  FS_ASSIGN_OR_RETURN(env.local_rank,
                      read_int("SLURM_LOCALID", 0, env.local_world_size - 1));
  FS_ASSIGN_OR_RETURN(const int job, read_int("SLURM_JOB_ID", 0, kMaxInt));
  FS_ASSIGN_OR_RETURN(const int step, read_int("SLURM_STEP_ID", 0, kMaxInt));
  // Below the range from which the kernel gives ports to clients.
  env.master_port =
      20000 + static_cast<int>((31 * int64_t{job} + step) % 12000);
  if (is_set("SLURM_STEP_NODELIST")) {
    env.master_addr = first_host(std::getenv("SLURM_STEP_NODELIST"));
  }
  if (env.rendezvous.empty()) {
    env.rendezvous = absl::StrCat("slurm-", job, "-", step);
  }
  return read_master(env);
}

}  // namespace

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || absl::StartsWith(host, "127.");
}

absl::StatusOr<LaunchEnv> LaunchEnv::from_environment() {
  LaunchEnv env;
  if (is_set("FULLSHARD_RENDEZVOUS")) {
    env.rendezvous = std::getenv("FULLSHARD_RENDEZVOUS");
  }
  if (is_set("RANK") || is_set("WORLD_SIZE")) {
    FS_RETURN_IF_ERROR(read_torchrun(env));
  } else if (is_set("OMPI_COMM_WORLD_SIZE")) {
    FS_RETURN_IF_ERROR(read_open_mpi(env));
  } else if (is_set("SLURM_PROCID") && is_set("SLURM_STEP_NUM_TASKS")) {
    FS_RETURN_IF_ERROR(read_slurm(env));
  } else {
    FS_RETURN_IF_ERROR(read_master(env));
  }
  if (env.world_size > 1 && env.rendezvous.empty() && env.master_port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("MASTER_PORT: expected the port of rank 0 for the ",
                     env.world_size, " ranks of the job, got none"));
  }
  return env;
}

}  // namespace fullshard
