#ifndef FULLSHARD_CORE_HOSTS_H_
#define FULLSHARD_CORE_HOSTS_H_

#include <chrono>
#include <string>
#include <vector>

#include "c10/util/intrusive_ptr.h"
#include "fullshard/core/launch_env.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace fullshard {

// The hosts of a job that runs on several, learnt through the job's store:
// which ranks can share memory, and who is still there when a collective fails.
class Hosts {
 public:
  using Store = c10::intrusive_ptr<c10d::Store>;

  // Tells the others where this rank is.
  Hosts(Store store, const LaunchEnv& env);

  // Whether all of `ranks` run on one host and in one network namespace, which
  // is what shared memory needs. Waits for them; throws at the store's
  // time-out.
  bool share_host(const std::vector<int>& ranks) const;

  // Call when a collective failed on this rank: says so to the others, gives
  // them `patience` to say the same, and returns one line that names the ranks
  // and hosts that did not, or that nobody is missing.
  std::string find_missing(std::chrono::milliseconds patience) const;

 private:
  Store store_;
  LaunchEnv env_;
};

// The address by which this host reaches `host`, as "10.0.0.2": where other
// hosts can reach this one in turn. Empty if there is no way to it.
std::string local_address_towards(const std::string& host);

}  // namespace fullshard

#endif  // FULLSHARD_CORE_HOSTS_H_
