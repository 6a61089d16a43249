#include "fullshard/core/hosts.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace fullshard {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

// What ranks that can share memory have in common: the running kernel and the
// network namespace, in which shared-memory groups find each other.
std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> net{};
  const ssize_t n = readlink("/proc/self/ns/net", net.data(), net.size() - 1);
  return absl::StrCat(boot, " ", n > 0 ? net.data() : "");
}

std::string key(const char* what, int rank) {
  return absl::StrCat("hosts/", what, "/", rank);
}

// "ranks 4-7 on host b".
std::string describe(const std::string& host, const std::vector<int>& ranks) {
  std::vector<std::string> runs;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    runs.push_back(last == i ? absl::StrCat(ranks[i])
                             : absl::StrCat(ranks[i], "-", ranks[last]));
    i = last + 1;
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ",
                      absl::StrJoin(runs, ", "), " on host ", host);
}

std::string ask_for_missing(c10d::Store& store, int world_size,
                            std::chrono::milliseconds patience) {
  std::vector<int> missing(static_cast<size_t>(world_size));
  for (int rank = 0; rank < world_size; ++rank) {
    missing[static_cast<size_t>(rank)] = rank;
  }
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (true) {
    missing.erase(
        std::remove_if(missing.begin(), missing.end(),
                       [&](int r) { return store.check({key("failed", r)}); }),
        missing.end());
    if (missing.empty()) return "every rank is still there";
    if (std::chrono::steady_clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  std::map<std::string, std::vector<int>> by_host;
  for (int rank : missing) {
    by_host[store.get_to_str(key("name", rank))].push_back(rank);
  }
  std::vector<std::string> parts;
  for (const auto& [host, ranks] : by_host) {
    parts.push_back(describe(host, ranks));
  }
  return absl::StrCat("no answer from ", absl::StrJoin(parts, "; "));
}

}  // namespace

Hosts::Hosts(Store store, const LaunchEnv& env)
    : store_(std::move(store)), env_(env) {
  store_->set(key("name", env_.rank), host_name());
  store_->set(key("identity", env_.rank), host_identity());
}

bool Hosts::share_host(const std::vector<int>& ranks) const {
  std::vector<std::string> keys;
  for (int rank : ranks) keys.push_back(key("identity", rank));
  store_->wait(keys);
  const std::vector<std::vector<uint8_t>> identities = store_->multiGet(keys);
  return std::all_of(identities.begin(), identities.end(),
                     [&](const auto& one) { return one == identities[0]; });
}

// [Note: Asking in a thread of its own] A store whose host is gone may never
// answer, and its client cannot be interrupted. The thread is left behind then.
std::string Hosts::find_missing(std::chrono::milliseconds patience) const {
  auto answer = std::make_shared<std::promise<std::string>>();
  std::future<std::string> future = answer->get_future();
  std::thread([store = store_, env = env_, patience, answer] {
    try {
      store->set(key("failed", env.rank), "");
      answer->set_value(ask_for_missing(*store, env.world_size, patience));
    } catch (const std::exception&) {
      answer->set_value(absl::StrCat("rank 0 on host ", env.master_addr,
                                     " has ended: its store is closed"));
    }
  }).detach();
  const auto limit = 2 * patience + std::chrono::seconds(1);
  if (future.wait_for(limit) == std::future_status::ready) return future.get();
  return absl::StrCat("no answer from rank 0 on host ", env_.master_addr);
}

std::string local_address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  std::string address;
  for (const addrinfo* a = found; a != nullptr && address.empty();
       a = a->ai_next) {
    const int fd = socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    std::array<char, NI_MAXHOST> text{};
    auto* generic = reinterpret_cast<sockaddr*>(&own);
    // Chooses the route; nothing is sent.
    if (connect(fd, a->ai_addr, a->ai_addrlen) == 0 &&
        getsockname(fd, generic, &length) == 0 &&
        getnameinfo(generic, length, text.data(), text.size(), nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      address = text.data();
    }
    close(fd);
  }
  freeaddrinfo(found);
  return address;
}

}  // namespace fullshard
