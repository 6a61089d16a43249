#include "fullshard/core/launch_env.h"

#include <fcntl.h>

#include <cstdlib>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"

namespace fullshard {
namespace {

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

}  // namespace

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || absl::StartsWith(host, "127.");
}

absl::StatusOr<LaunchEnv> LaunchEnv::from_environment() {
  constexpr int kMaxRanks = std::numeric_limits<int>::max();
  LaunchEnv env;
  if (is_set("MASTER_ADDR")) env.master_addr = std::getenv("MASTER_ADDR");
  if (is_set("MASTER_PORT")) {
    FS_ASSIGN_OR_RETURN(env.master_port, read_int("MASTER_PORT", 0, 65535));
  }
  if (is_set("FULLSHARD_RENDEZVOUS")) {
    env.rendezvous = std::getenv("FULLSHARD_RENDEZVOUS");
  }
  if (is_set("TORCHELASTIC_USE_AGENT_STORE")) {
    env.launcher_serves_store = absl::EqualsIgnoreCase(
        std::getenv("TORCHELASTIC_USE_AGENT_STORE"), "true");
  }
  if (!is_set("RANK") && !is_set("WORLD_SIZE")) return env;
  FS_ASSIGN_OR_RETURN(env.world_size, read_int("WORLD_SIZE", 1, kMaxRanks));
  FS_ASSIGN_OR_RETURN(env.rank, read_int("RANK", 0, env.world_size - 1));
  FS_RETURN_IF_ERROR(read_local_ranks(env));
  if (env.rank == 0 && is_set("FULLSHARD_MASTER_FD")) {
    FS_ASSIGN_OR_RETURN(int fd, read_int("FULLSHARD_MASTER_FD", 0, kMaxRanks));
    // A process that a rank started may have the variable but not the socket.
    if (fcntl(fd, F_GETFD) >= 0) env.master_listen_fd = fd;
  }
  if (env.world_size > 1 && env.rendezvous.empty() && env.master_port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("MASTER_PORT: expected the port of rank 0 for the ",
                     env.world_size, " ranks of WORLD_SIZE, got none"));
  }
  return env;
}

}  // namespace fullshard
