#include "fullshard/tests/testing/net_hosts.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace fullshard {
namespace testing {
namespace {

constexpr int kNamespaces = CLONE_NEWNET | CLONE_NEWUTS;

// As root, or as the root of a user namespace that has only this user.
bool leave_network() {
  if (unshare(kNamespaces) == 0) return true;
  const uid_t user = getuid();
  if (unshare(CLONE_NEWUSER | kNamespaces) != 0) return false;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << absl::StrCat("0 ", user, " 1");
  return true;
}

int this_network() { return open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC); }

bool run(const std::string& command) {
  return std::system(command.c_str()) == 0;  // NOLINT: fixed commands
}

void must(bool worked, const char* what) {
  if (worked) return;
  std::perror(what);
  std::abort();
}

}  // namespace

std::unique_ptr<NetHosts> NetHosts::create(std::string* reason) {
  if (!run("ip -V >/dev/null 2>&1")) {
    *reason = "no `ip` here; install iproute2";
    return nullptr;
  }
  if (!leave_network()) {
    *reason = absl::StrCat("no right to make network namespaces: ",
                           std::strerror(errno));
    return nullptr;
  }
  const int first = this_network();
  must(unshare(CLONE_NEWNET) == 0, "second network namespace");
  const int second = this_network();
  must(run("ip link set lo up"), "loopback of host-b");
  must(setns(first, CLONE_NEWNET) == 0, "back to host-a");
  must(run(absl::StrCat(
           "ip link set lo up && ip link add cable type veth peer name cable "
           "netns /proc/",
           getpid(), "/fd/", second, " && ip addr add ", kFirstAddress,
           "/24 dev cable && ip link set cable up")),
       "cable at host-a");
  must(setns(second, CLONE_NEWNET) == 0, "to host-b");
  must(run("ip addr add 10.77.0.2/24 dev cable && ip link set cable up"),
       "cable at host-b");
  must(setns(first, CLONE_NEWNET) == 0, "back to host-a");
  return std::unique_ptr<NetHosts>(new NetHosts(first, second));
}

void NetHosts::enter(int host) const {
  must(setns(namespaces_[host], CLONE_NEWNET) == 0, "enter a host");
  must(unshare(CLONE_NEWUTS) == 0, "a host name of its own");
  must(sethostname(host == 0 ? "host-a" : "host-b", 6) == 0, "host name");
}

void NetHosts::cut() { must(run("ip link set cable down"), "cut the cable"); }
void NetHosts::mend() { must(run("ip link set cable up"), "mend the cable"); }

}  // namespace testing
}  // namespace fullshard
