#include "fullshard/core/shm_peers.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/util/Exception.h"
#include "fullshard/core/status.h"
#include "fullshard/core/watchdog.h"

namespace fullshard {
namespace internal {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kMagic = 0xf5113a2d;
constexpr size_t kMaxDescriptors = 250;  // the kernel's limit is 253
constexpr std::chrono::milliseconds kRetryDelay{2};
constexpr std::chrono::milliseconds kHelloTimeout{5000};

// The first message on a connection, and the head of every later one.
struct Message {
  uint32_t magic = kMagic;
  int32_t rank = 0;
  int32_t size = 0;
  int32_t pid = 0;
  uint64_t value = 0;
};

struct AbstractName {
  sockaddr_un address;
  socklen_t length;
};

AbstractName abstract_name(const ShmGroupOptions& options) {
  std::string name = absl::StrCat("fullshard-", getuid(), "-",
                                  options.rendezvous, "-", options.group_name);
  AbstractName result{};
  if (name.size() > sizeof(result.address.sun_path) - 1) {
    name = absl::StrCat("fullshard-", getuid(), "-",
                        absl::Hex(std::hash<std::string>()(name)));
  }
  result.address.sun_family = AF_UNIX;
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());
  result.length = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  return result;
}

bool wait_readable(int fd, Clock::time_point deadline) {
  while (true) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - Clock::now());
    pollfd poll_fd{fd, POLLIN, 0};
    int timeout = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1000));
    int ready = poll(&poll_fd, 1, timeout);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (left.count() <= 0) return false;
  }
}

bool send_message(int socket, const Message& message, const int* fds = nullptr,
                  size_t num_fds = 0) {
  iovec part{const_cast<Message*>(&message), sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)];
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (num_fds > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * num_fds);
    cmsghdr* first = CMSG_FIRSTHDR(&header);
    first->cmsg_level = SOL_SOCKET;
    first->cmsg_type = SCM_RIGHTS;
    first->cmsg_len = CMSG_LEN(sizeof(int) * num_fds);
    std::memcpy(CMSG_DATA(first), fds, sizeof(int) * num_fds);
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(sizeof(message));
}

enum class Received { kMessage, kLate, kClosed, kForeign };

Received receive_message(int socket, Clock::time_point deadline,
                         Message& message, std::vector<UniqueFd>* fds) {
  if (!wait_readable(socket, deadline)) return Received::kLate;
  iovec part{&message, sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)];
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t received;
  do {
    received = recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  } while (received < 0 && errno == EINTR);
  if (received <= 0) return Received::kClosed;
  std::vector<UniqueFd> got;
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      got.emplace_back(fd);
    }
  }
  if (fds != nullptr) *fds = std::move(got);
  bool ours = received == static_cast<ssize_t>(sizeof(message)) &&
              message.magic == kMagic;
  return ours ? Received::kMessage : Received::kForeign;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == getuid();
}

UniqueFd unix_socket() {
  return UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

absl::Status system_error(absl::string_view what) {
  return absl::InternalError(absl::StrCat(what, ": ", std::strerror(errno)));
}

}  // namespace

ShmPeers::ShmPeers(const ShmGroupOptions& options)
    : options_(options),
      timeout_ms_(options.timeout.count()),
      sockets_(options.size),
      pids_(options.size, 0) {
  pids_[options.rank] = getpid();
}

absl::StatusOr<std::shared_ptr<ShmPeers>> ShmPeers::connect(
    const ShmGroupOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("group '", options.group_name, "': expected a rank below ",
                     options.size, ", got ", options.rank));
  }
  if (static_cast<size_t>(options.size) > kMaxDescriptors) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group '", options.group_name, "': shared memory serves at most ",
        kMaxDescriptors, " ranks of a host, got ", options.size));
  }
  ShmGroupOptions complete = options;
  if (complete.global_ranks.empty()) {
    complete.global_ranks.resize(options.size);
    std::iota(complete.global_ranks.begin(), complete.global_ranks.end(), 0);
  }
  if (complete.global_ranks.size() != static_cast<size_t>(options.size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group '", options.group_name, "': expected ", options.size,
        " global ranks, got ", complete.global_ranks.size()));
  }
  std::shared_ptr<ShmPeers> peers(new ShmPeers(complete));
  if (options.size > 1) {
    FS_RETURN_IF_ERROR(annotate(
        options.rank == 0 ? peers->host_rendezvous() : peers->join_rendezvous(),
        absl::StrCat(peers->name(options.rank), ", group '", options.group_name,
                     "'")));
  }
  return peers;
}

std::string ShmPeers::name(int rank) const {
  return absl::StrCat("rank ", options_.global_ranks[rank]);
}

std::string ShmPeers::names(const std::vector<int>& ranks,
                            bool with_pids) const {
  std::vector<std::string> parts;
  for (int rank : ranks) {
    parts.push_back(name(rank));
    if (with_pids) absl::StrAppend(&parts.back(), " (pid ", pids_[rank], ")");
  }
  return absl::StrJoin(parts, ", ");
}

bool ShmPeers::is_gone(int rank) const {
  if (rank == options_.rank) return false;
  if (!sockets_[rank].valid()) return true;
  pollfd poll_fd{sockets_[rank].get(), POLLRDHUP, 0};
  return poll(&poll_fd, 1, 0) > 0 &&
         (poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

void ShmPeers::leave() {
  // The descriptors stay valid for threads that poll them.
  for (UniqueFd& socket : sockets_) {
    if (socket.valid()) shutdown(socket.get(), SHUT_RDWR);
  }
}

absl::Status ShmPeers::host_rendezvous() {
  const Clock::time_point deadline = Clock::now() + timeout();
  const AbstractName name = abstract_name(options_);
  UniqueFd listener = unix_socket();
  if (!listener.valid()) return system_error("socket");
  while (bind(listener.get(), reinterpret_cast<const sockaddr*>(&name.address),
              name.length) != 0) {
    if (errno != EADDRINUSE) return system_error("bind");
    if (Clock::now() > deadline) {
      return absl::AlreadyExistsError(absl::StrCat(
          "another job of this user already meets at '", options_.rendezvous,
          "'; give this one another MASTER_PORT"));
    }
    std::this_thread::sleep_for(kRetryDelay);
  }
  if (listen(listener.get(), options_.size) != 0) return system_error("listen");
  FS_RETURN_IF_ERROR(accept_members(listener));
  // Closed before anyone gets on, so that a later group may use the name.
  listener.reset();
  return introduce_members();
}

absl::Status ShmPeers::accept_members(const UniqueFd& listener) {
  const Clock::time_point deadline = Clock::now() + timeout();
  int missing = size() - 1;
  while (missing > 0) {
    if (!wait_readable(listener.get(), deadline)) {
      std::vector<int> late;
      for (int r = 1; r < size(); ++r) {
        if (!sockets_[r].valid()) late.push_back(r);
      }
      return absl::DeadlineExceededError(absl::StrCat(
          names(late, false), " did not come to the rendezvous '",
          options_.rendezvous, "' within ", describe_duration(timeout())));
    }
    UniqueFd socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Message hello;
    if (!socket.valid() || !same_user(socket.get()) ||
        receive_message(socket.get(), Clock::now() + kHelloTimeout, hello,
                        nullptr) != Received::kMessage) {
      continue;
    }
    if (hello.size != size() || hello.rank < 1 || hello.rank >= size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("expected ", size(), " ranks, but pid ", hello.pid,
                       " calls itself ", hello.rank, " of ", hello.size));
    }
    if (sockets_[hello.rank].valid()) {
      return absl::InvalidArgumentError(
          absl::StrCat("pid ", pids_[hello.rank], " and pid ", hello.pid,
                       " both call themselves ", name(hello.rank)));
    }
    pids_[hello.rank] = hello.pid;
    sockets_[hello.rank] = std::move(socket);
    --missing;
  }
  return absl::OkStatus();
}

// Sends every member the pids of all and its ends of the pairwise sockets.
absl::Status ShmPeers::introduce_members() {
  std::vector<std::vector<UniqueFd>> ends(size());
  for (auto& row : ends) row.resize(size());
  for (int a = 1; a < size(); ++a) {
    for (int b = a + 1; b < size(); ++b) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
        return system_error("socketpair");
      }
      ends[a][b].reset(pair[0]);
      ends[b][a].reset(pair[1]);
    }
  }
  for (int to = 1; to < size(); ++to) {
    for (int about = 0; about < size(); ++about) {
      Message message;
      message.rank = about;
      message.size = size();
      message.pid = pids_[about];
      int fd = ends[to][about].get();
      if (!send_message(sockets_[to].get(), message, &fd, fd >= 0 ? 1 : 0)) {
        return absl::UnavailableError(
            absl::StrCat(name(to), " went away during the rendezvous"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status ShmPeers::join_rendezvous() {
  const Clock::time_point deadline = Clock::now() + timeout();
  const AbstractName address = abstract_name(options_);
  UniqueFd& host = sockets_[0];
  while (true) {
    host = unix_socket();
    if (!host.valid()) return system_error("socket");
    if (::connect(host.get(),
                  reinterpret_cast<const sockaddr*>(&address.address),
                  address.length) == 0) {
      break;
    }
    if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
      return system_error("connect");
    }
    if (Clock::now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(
          name(0), " did not open the rendezvous '", options_.rendezvous,
          "' within ", describe_duration(timeout())));
    }
    std::this_thread::sleep_for(kRetryDelay);
  }
  if (!same_user(host.get())) {
    return absl::PermissionDeniedError(absl::StrCat(
        "the rendezvous '", options_.rendezvous, "' belongs to another user"));
  }
  Message hello;
  hello.rank = rank();
  hello.size = size();
  hello.pid = getpid();
  send_message(host.get(), hello);
  for (int about = 0; about < size(); ++about) {
    Message message;
    std::vector<UniqueFd> fds;
    Received got = receive_message(host.get(), deadline, message, &fds);
    if (got == Received::kLate) {
      return absl::DeadlineExceededError(absl::StrCat(
          "not all ranks came to the rendezvous '", options_.rendezvous,
          "' within ", describe_duration(timeout())));
    }
    if (got != Received::kMessage || message.rank != about) {
      return absl::UnavailableError(
          absl::StrCat(name(0), " gave up the rendezvous '",
                       options_.rendezvous, "'; its message says why"));
    }
    pids_[about] = message.pid;
    if (!fds.empty()) sockets_[about] = std::move(fds[0]);
  }
  return absl::OkStatus();
}

UniqueFd ShmPeers::share_memory_file(size_t num_bytes) {
  Message message;
  message.rank = 0;
  message.value = num_bytes;
  if (rank() == 0) {
    UniqueFd file = create_memory_file(num_bytes);
    int fd = file.get();
    for (int r = 1; r < size(); ++r) {
      TORCH_CHECK_WITH(
          DistBackendError, send_message(sockets_[r].get(), message, &fd, 1),
          names({r}, true), " is gone: ", describe_wait("sharing memory"),
          " cannot finish");
    }
    return file;
  }
  std::vector<UniqueFd> fds;
  Received got = receive_message(sockets_[0].get(), Clock::now() + timeout(),
                                 message, &fds);
  TORCH_CHECK_WITH(DistBackendError, got != Received::kLate, name(0),
                   " did not arrive at ", describe_wait("sharing memory"),
                   " within ", describe_duration(timeout()));
  TORCH_CHECK_WITH(
      DistBackendError, got == Received::kMessage && fds.size() == 1,
      names({0}, true), " is gone: ", describe_wait("sharing memory"),
      " cannot finish");
  TORCH_CHECK_WITH(DistBackendError, message.value == num_bytes, name(rank()),
                   " shares ", num_bytes, " bytes of memory but ", name(0),
                   " shares ", message.value);
  return std::move(fds[0]);
}

}  // namespace internal
}  // namespace fullshard
