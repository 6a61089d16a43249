#ifndef FULLSHARD_CORE_SHM_PEERS_H_
#define FULLSHARD_CORE_SHM_PEERS_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "fullshard/core/shm_memory.h"

namespace fullshard {

// Which ranks of one host form a group, and how they find each other.
struct ShmGroupOptions {
  // Equal on all ranks of the job and unique to it on this host.
  std::string rendezvous;
  // Unique to the group within the job.
  std::string group_name = "world";
  int rank = 0;
  int size = 1;
  // The members' ranks in the world, for messages. Empty: 0 to size - 1.
  std::vector<int> global_ranks;
  // How long any rank waits for another.
  std::chrono::milliseconds timeout{300000};
};

namespace internal {

// The connections between the members of a group: one Unix socket per pair.
//
// They carry file descriptors at set-up and stay open afterwards: the kernel
// closes them with the process, however it ends, and so tells the others. The
// names are abstract (no file system), so nothing is left behind.
//
// Thread safety: everything but share_memory_file() may be called concurrently.
class ShmPeers {
 public:
  // Meets the other members.
  //
  // Collective: all members, in any order, from forked or unrelated processes
  // of one user.
  // Errors: DeadlineExceeded naming the ranks that did not come;
  // InvalidArgument where ranks disagree on the group; Unavailable when a rank
  // went away.
  static absl::StatusOr<std::shared_ptr<ShmPeers>> connect(
      const ShmGroupOptions& options);

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::string& group_name() const { return options_.group_name; }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load());
  }
  void set_timeout(std::chrono::milliseconds timeout) {
    timeout_ms_.store(timeout.count());
  }

  // Returns "rank 2", with the rank's number in the world.
  std::string name(int rank) const;
  // Returns the names of `ranks`: "rank 1, rank 2 (pid 4711)".
  std::string names(const std::vector<int>& ranks, bool with_pids) const;

  // True when the process of `rank` ended or left the group.
  bool is_gone(int rank) const;

  // Returns one new memory file, the same on every rank.
  //
  // Collective: all members, in the same order.
  // Errors: c10::Error naming the rank that is gone or late, or the sizes where
  // they differ.
  UniqueFd share_memory_file(size_t num_bytes);

  // Leaves the group: the others see this rank as gone.
  void leave();

 private:
  explicit ShmPeers(const ShmGroupOptions& options);
  absl::Status host_rendezvous();
  absl::Status join_rendezvous();
  absl::Status accept_members(const UniqueFd& listener);
  absl::Status introduce_members();

  const ShmGroupOptions options_;
  std::atomic<int64_t> timeout_ms_;
  std::vector<UniqueFd> sockets_;  // by rank in the group; none for our own
  std::vector<int> pids_;
};

}  // namespace internal
}  // namespace fullshard

#endif  // FULLSHARD_CORE_SHM_PEERS_H_
