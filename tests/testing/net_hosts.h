#ifndef FULLSHARD_TESTS_TESTING_NET_HOSTS_H_
#define FULLSHARD_TESTS_TESTING_NET_HOSTS_H_

#include <memory>
#include <string>

namespace fullshard {
namespace testing {

// Two hosts on one machine: network namespaces joined by a cable, with the
// addresses 10.77.0.1 and 10.77.0.2 and the names host-a and host-b.
//
// Needs `ip` (iproute2) and the right to make namespaces: root's, or that of
// user namespaces. Moves the calling process into host-a, for good.
class NetHosts {
 public:
  static constexpr char kFirstAddress[] = "10.77.0.1";

  // Returns null, and why in `reason`, where this machine does not allow it.
  static std::unique_ptr<NetHosts> create(std::string* reason);

  // Moves this process to host 0 or 1. Aborts if that fails.
  void enter(int host) const;

  // Pulls the cable, and puts it back. Call on host-a.
  static void cut();
  static void mend();

 private:
  NetHosts(int first, int second) : namespaces_{first, second} {}

  int namespaces_[2];  // Descriptors, kept open for the process's life.
};

}  // namespace testing
}  // namespace fullshard

#endif  // FULLSHARD_TESTS_TESTING_NET_HOSTS_H_
