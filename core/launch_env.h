#ifndef FULLSHARD_CORE_LAUNCH_ENV_H_
#define FULLSHARD_CORE_LAUNCH_ENV_H_

#include <string>

#include "absl/status/statusor.h"

namespace fullshard {

// Where this process stands in the job, as its launcher tells it.
//
// Three kinds of launcher are understood, in this order:
// - torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
//   MASTER_PORT. FullShard's own launcher sets the same ones,
//   FULLSHARD_RENDEZVOUS and FULLSHARD_MASTER_FD.
// - Open MPI's mpirun: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE.
//   Over several hosts it needs MASTER_ADDR and MASTER_PORT too (mpirun -x).
// - Slurm's srun with more than one task: SLURM_PROCID, SLURM_STEP_NUM_TASKS,
//   SLURM_LOCALID, SLURM_NODEID and SLURM_STEP_TASKS_PER_NODE. The first host
//   of SLURM_STEP_NODELIST serves the store, at a port that follows from the
//   ids of job and step; MASTER_ADDR and MASTER_PORT override both.
struct LaunchEnv {
  // A launcher started this process as one rank of its job.
  bool launched = false;
  int rank = 0;
  int world_size = 1;
  // Position among the ranks of this host, and how many those are.
  int local_rank = 0;
  int local_world_size = 1;
  // Where rank 0 serves the store of multi-host backends. Port 0: none.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  // Unique to the job on this host; ranks of one host find each other by it.
  // Empty: the master's address and port stand in for it.
  std::string rendezvous;
  // A socket that already listens on `master_port`, handed to rank 0 by our
  // launcher so that no other process can take the port. -1: none.
  int master_listen_fd = -1;
  // The launcher itself serves the store (torchrun does): every rank connects.
  bool launcher_serves_store = false;

  // True when every rank of the job runs on this host.
  bool single_host() const { return local_world_size == world_size; }

  // Reads the environment. Without a launcher: a world of one rank. Where a
  // launcher does not tell LOCAL_WORLD_SIZE, all ranks count as local when the
  // master is this host's loopback address, else this rank is alone on its
  // host.
  //
  // Errors: InvalidArgument naming the variable, what was expected and what was
  // found, for a value that is missing, not a number or out of range.
  static absl::StatusOr<LaunchEnv> from_environment();
};

// True for the names and addresses of this host's loopback interface.
bool is_loopback(const std::string& host);

}  // namespace fullshard

#endif  // FULLSHARD_CORE_LAUNCH_ENV_H_
