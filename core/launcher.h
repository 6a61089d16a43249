#ifndef FULLSHARD_CORE_LAUNCHER_H_
#define FULLSHARD_CORE_LAUNCHER_H_

#include <chrono>
#include <functional>

#include "fullshard/core/launch_env.h"

namespace fullshard {

struct LauncherOptions {
  // Ranks to start, all on this host.
  int num_ranks = 2;

  // Intra-op threads of a rank. 0: the cores this process may use, divided by
  // the ranks, at least one; a user's OMP_NUM_THREADS wins over that.
  int threads_per_rank = 0;

  // After a rank failed, the others get SIGTERM at once and SIGKILL after this
  // long.
  std::chrono::milliseconds grace{5000};
};

// Runs `body` in `num_ranks` forked processes and waits for them.
//
// Each rank finds itself in its LaunchEnv and in the environment (the variables
// of torchrun and FULLSHARD_RENDEZVOUS). What `body` returns is its exit
// status; an exception is printed and counts as 1. Ranks end without running
// destructors of static objects.
//
// A rank keeps memory that it frees (up to 512 MiB at the top of its heap), so
// that a step does not fault it in again.
//
// The ranks form a process group of their own. SIGINT, SIGTERM and SIGHUP are
// forwarded to it and the ranks decide; a second one kills them at once. Ranks
// die with the calling thread, whatever ends it.
//
// Returns 0 if all ranks did, else the status of the first rank that failed:
// its exit status, or 128 + the signal that killed it, after a line that names
// it.
//
// Requires: the process has no threads yet and has run no tensor code, nor does
// it afterwards: OpenMP's threads do not survive a fork.
int launch_ranks(const LauncherOptions& options,
                 const std::function<int(const LaunchEnv&)>& body);

}  // namespace fullshard

#endif  // FULLSHARD_CORE_LAUNCHER_H_
