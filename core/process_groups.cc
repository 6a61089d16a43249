#include "fullshard/core/process_groups.h"

#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "fullshard/core/fake_backend.h"
#include "fullshard/core/hosts.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/shm_backend.h"
#include "fullshard/core/single_backend.h"
#include "fullshard/core/status.h"
#include "fullshard/core/watchdog.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"
#ifdef USE_C10D_NCCL
#include "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
#endif

namespace fullshard {
namespace {

using Group = ProcessGroups::Group;
using Store = c10::intrusive_ptr<c10d::Store>;

constexpr std::chrono::milliseconds kFarewellTimeout{5000};
// How much later than this one another rank may notice the same failure.
constexpr std::chrono::milliseconds kPatience{2000};

// The members of a group, in order, and this rank's place among them.
struct Members {
  std::string name;
  std::vector<int> ranks;
  int rank_in_group;
};

Members strided(const std::string& name, int rank, int first, int stride,
                int count) {
  Members members{name, {}, (rank - first) / stride};
  for (int i = 0; i < count; ++i) members.ranks.push_back(first + i * stride);
  return members;
}

int num_cuda_devices() {
#ifdef USE_C10D_NCCL
  return c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
#else
  return 0;
#endif
}

absl::StatusOr<std::string> choose_backend(const std::string& name,
                                           const LaunchEnv& env) {
  if (name.empty()) {
    if (env.world_size == 1) return std::string("single");
    if (num_cuda_devices() >= env.local_world_size) return std::string("nccl");
    return std::string(env.single_host() ? "shm" : "shm+gloo");
  }
  if (name != "shm" && name != "gloo" && name != "shm+gloo" && name != "nccl" &&
      name != "single" && name != "fake") {
    return absl::InvalidArgumentError(
        absl::StrCat("backend: expected shm, gloo, shm+gloo, nccl, single, "
                     "fake or nothing (automatic), got '",
                     name, "'"));
  }
  if (name == "shm" && !env.single_host()) {
    return absl::FailedPreconditionError(
        absl::StrCat("backend shm: expected all ", env.world_size,
                     " ranks on one host, got ", env.local_world_size,
                     " on this one; use shm+gloo or gloo across hosts"));
  }
  if (name == "single" && env.world_size != 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "backend single: expected a world of 1 rank, got ", env.world_size));
  }
  if (name == "nccl" && num_cuda_devices() < env.local_world_size) {
#ifdef USE_C10D_NCCL
    return absl::FailedPreconditionError(absl::StrCat(
        "backend nccl: expected a GPU for each of the ", env.local_world_size,
        " ranks of this host, got ", num_cuda_devices()));
#else
    return absl::FailedPreconditionError(
        "backend nccl: this build has no CUDA; build with --config=cuda");
#endif
  }
  return name;
}

c10::Device choose_device(const std::string& backend, const LaunchEnv& env) {
  const bool use_gpu =
      backend == "nccl" || (backend == "single" && num_cuda_devices() > 0);
  if (!use_gpu) return c10::Device(c10::kCPU);
  const c10::Device device(c10::kCUDA,
                           static_cast<c10::DeviceIndex>(env.local_rank));
  c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(device);
  return device;
}

// Runs `make`, turning what LibTorch and Gloo throw into a status.
template <typename Make>
auto catching(const std::string& where, const Make& make)
    -> absl::StatusOr<decltype(make())> {
  try {
    return make();
  } catch (const c10::Error& error) {
    return absl::UnavailableError(
        absl::StrCat(where, ": ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat(where, ": ", error.what()));
  }
}

absl::StatusOr<Store> open_store(const LaunchEnv& env,
                                 std::chrono::milliseconds timeout) {
  if (env.master_port == 0 && env.master_listen_fd < 0) {
    return absl::FailedPreconditionError(
        "MASTER_PORT: expected the port of rank 0's store, got none");
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.isServer = env.rank == 0 && !env.launcher_serves_store;
  options.numWorkers = static_cast<size_t>(env.world_size);
  options.waitWorkers = !env.launcher_serves_store;
  options.timeout = timeout;
  if (options.isServer && env.master_listen_fd >= 0) {
    options.masterListenFd = env.master_listen_fd;
  }
  return catching(
      absl::StrCat("store at ", env.master_addr, ":", env.master_port),
      [&]() -> Store {
        return c10::make_intrusive<c10d::PrefixStore>(
            "fullshard",
            c10::make_intrusive<c10d::TCPStore>(env.master_addr, options));
      });
}

// Gloo writes to its sockets as to files: one whose peer has died would end
// this process by a signal, without a word. Python ignores the signal too.
void ignore_broken_pipes() {
  struct sigaction current {};
  if (sigaction(SIGPIPE, nullptr, &current) == 0 &&
      current.sa_handler == SIG_DFL) {
    signal(SIGPIPE, SIG_IGN);
  }
}

// Makes the groups of one backend.
class GroupFactory {
 public:
  GroupFactory(const LaunchEnv& env, const std::string& backend,
               c10::Device device, std::chrono::milliseconds timeout,
               Store store, const Hosts* hosts)
      : env_(env),
        backend_(backend),
        device_(device),
        timeout_(timeout),
        store_(std::move(store)),
        hosts_(hosts) {}

  absl::StatusOr<Group> make(const Members& members) const {
    if (members.ranks.size() == 1) {
      return Group(c10::make_intrusive<SingleBackend>());
    }
    if (backend_ == "fake") {
      return Group(c10::make_intrusive<FakeBackend>(
          members.rank_in_group, static_cast<int>(members.ranks.size())));
    }
    const std::string where =
        absl::StrCat(backend_, " group '", members.name, "'");
    bool shared = backend_ == "shm";
    if (backend_ == "shm+gloo") {
      FS_ASSIGN_OR_RETURN(shared, catching(where, [&] {
                            return hosts_->share_host(members.ranks);
                          }));
    }
    if (shared) return make_shm(members);
    return catching(where, [&] { return make_remote(members); });
  }

 private:
  absl::StatusOr<Group> make_shm(const Members& members) const {
    ShmGroupOptions options;
    options.rendezvous =
        env_.rendezvous.empty()
            ? absl::StrCat(env_.master_addr, ":", env_.master_port)
            : env_.rendezvous;
    options.group_name = members.name;
    options.rank = members.rank_in_group;
    options.size = static_cast<int>(members.ranks.size());
    options.global_ranks = members.ranks;
    options.timeout = timeout_;
    FS_ASSIGN_OR_RETURN(Group group, ShmBackend::create(options));
    return group;
  }

  Group make_remote(const Members& members) const {
    Store store = c10::make_intrusive<c10d::PrefixStore>(members.name, store_);
    const int size = static_cast<int>(members.ranks.size());
#ifdef USE_C10D_NCCL
    if (backend_ == "nccl") {
      auto options = c10d::ProcessGroupNCCL::Options::create();
      options->timeout = timeout_;
      options->group_name = members.name;
      options->global_ranks_in_group.assign(members.ranks.begin(),
                                            members.ranks.end());
      auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(
          store, members.rank_in_group, size, options);
      group->setBoundDeviceId(device_);
      group->setGroupUid(members.name);
      return group;
    }
#endif
    TORCH_INTERNAL_ASSERT(device_.is_cpu());
    auto options = c10d::ProcessGroupGloo::Options::create(timeout_);
    options->devices.push_back(gloo_device());
    auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(
        store, members.rank_in_group, size, options);
    group->setGroupUid(members.name);
    return group;
  }

  // Gloo's own choice, the address of the host's name, is often a loopback
  // address, at which other hosts find nobody.
  std::shared_ptr<gloo::transport::Device> gloo_device() const {
    const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
    if (interface != nullptr && *interface != '\0') {
      return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
    }
    const std::string address = local_address_towards(env_.master_addr);
    TORCH_CHECK(!address.empty(), "MASTER_ADDR: no way to host '",
                env_.master_addr, "'");
    return c10d::ProcessGroupGloo::createDeviceForHostname(address);
  }

  const LaunchEnv& env_;
  const std::string backend_;
  const c10::Device device_;
  const std::chrono::milliseconds timeout_;
  const Store store_;
  const Hosts* const hosts_;
};

}  // namespace

struct ProcessGroups::State {
  State(const LaunchEnv& env, std::string backend, c10::Device device)
      : env(env), backend(std::move(backend)), device(device) {}
  ~State();
  void watch_hosts();
  void wait_for_all(const std::string& key, int count);

  const LaunchEnv env;
  const std::string backend;
  const c10::Device device;
  Store store;                   // null where no group needs one
  std::shared_ptr<Hosts> hosts;  // null if there is only one
  std::shared_ptr<std::atomic<bool>> failed =
      std::make_shared<std::atomic<bool>>(false);
  Group world, shard_group, replicate_group, reshard_group;
};

// [Note: Leaving Gloo] A rank whose peer closes a connection in the middle of a
// collective aborts, and so does one whose store goes away. So all ranks first
// agree that they have finished, and rank 0, which serves the store, is last.
ProcessGroups::State::~State() {
  if (hosts) CollectiveScope::watch(nullptr);
  const bool failing = *failed || std::uncaught_exceptions() > 0;
  if (store && !failing) wait_for_all("finished", env.world_size);
  reshard_group.reset();
  replicate_group.reset();
  shard_group.reset();
  world.reset();
  if (store && !failing) {
    try {
      store->add("left", 1);
    } catch (const std::exception&) {
      return;
    }
    if (env.rank == 0) wait_for_all("left", env.world_size);
  }
}

// A collective that fails says which rank it saw go, at best; the line of this
// rank says who is gone. Rank 0 serves the others' questions a while longer.
void ProcessGroups::State::watch_hosts() {
  CollectiveScope::watch([hosts = hosts, failed = failed,
                          rank = env.rank](const std::string& collective) {
    *failed = true;
    log_error(
        absl::StrCat(collective, " failed: ", hosts->find_missing(kPatience)));
    if (rank == 0) std::this_thread::sleep_for(kPatience);
  });
}

// Waits until `count` ranks were here, or no longer than a rank that died can
// be allowed to hold up the others.
void ProcessGroups::State::wait_for_all(const std::string& key, int count) {
  const auto deadline = std::chrono::steady_clock::now() + kFarewellTimeout;
  try {
    int64_t arrived = store->add(key, key == "left" ? 0 : 1);
    while (arrived < count && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      arrived = store->add(key, 0);
    }
  } catch (const std::exception& error) {
    log_warning(absl::StrCat("the store closed early: ", error.what()));
  }
}

ProcessGroups::ProcessGroups(std::shared_ptr<State> state)
    : state_(std::move(state)) {}

ProcessGroups::ProcessGroups(const LaunchEnv& env, const std::string& backend,
                             c10::Device device, Group world, Group shard_group,
                             Group replicate_group, Group reshard_group)
    : state_(std::make_shared<State>(env, backend, device)) {
  state_->world = std::move(world);
  state_->shard_group = std::move(shard_group);
  state_->replicate_group = std::move(replicate_group);
  state_->reshard_group = std::move(reshard_group);
}

int ProcessGroups::rank() const { return state_->env.rank; }
int ProcessGroups::world_size() const { return state_->env.world_size; }
int ProcessGroups::local_rank() const { return state_->env.local_rank; }
const LaunchEnv& ProcessGroups::env() const { return state_->env; }
c10::Device ProcessGroups::device() const { return state_->device; }
const std::string& ProcessGroups::backend() const { return state_->backend; }
const Group& ProcessGroups::world() const { return state_->world; }
const Group& ProcessGroups::shard_group() const { return state_->shard_group; }
const Group& ProcessGroups::replicate_group() const {
  return state_->replicate_group;
}
const Group& ProcessGroups::reshard_group() const {
  return state_->reshard_group;
}

ShmBackend* ProcessGroups::shm(const Group& group) {
  return dynamic_cast<ShmBackend*>(group.get());
}

absl::StatusOr<ProcessGroups> init_process_groups(
    const LaunchEnv& env, const ProcessGroupsOptions& options) {
  set_log_rank(env.rank, env.world_size);
  const int world = env.world_size;
  const int shard =
      options.shard_group_size == 0 ? world : options.shard_group_size;
  if (shard < 1 || shard > world || world % shard != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard_group_size: expected a divisor of the ", world,
                     " ranks of the world, got ", options.shard_group_size));
  }
  const int reshard = options.reshard_group_size;
  if (reshard != 0 &&
      (reshard < 1 || reshard > shard || shard % reshard != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("reshard_group_size: expected a divisor of the ", shard,
                     " ranks of a shard group, got ", reshard));
  }
  FS_ASSIGN_OR_RETURN(std::string backend,
                      choose_backend(options.backend, env));
  const c10::Device device = choose_device(backend, env);
  auto state = std::make_shared<ProcessGroups::State>(env, backend, device);
  const bool remote =
      backend == "gloo" || backend == "shm+gloo" || backend == "nccl";
  if (remote && world > 1) {
    ignore_broken_pipes();
    FS_ASSIGN_OR_RETURN(state->store, open_store(env, options.timeout));
    if (!env.single_host()) {
      FS_ASSIGN_OR_RETURN(state->hosts, catching("store", [&] {
                            return std::make_shared<Hosts>(state->store, env);
                          }));
      state->watch_hosts();
    }
  }
  const GroupFactory factory(env, backend, device, options.timeout,
                             state->store, state->hosts.get());
  FS_ASSIGN_OR_RETURN(state->world,
                      factory.make(strided("world", env.rank, 0, 1, world)));
  if (reshard != 0 && reshard < shard) {
    const int first = env.rank / reshard * reshard;
    FS_ASSIGN_OR_RETURN(
        state->reshard_group,
        factory.make(strided(absl::StrCat("reshard", first / reshard), env.rank,
                             first, 1, reshard)));
  }
  if (shard == world) {
    state->shard_group = state->world;
    state->replicate_group = c10::make_intrusive<SingleBackend>();
    return ProcessGroups(std::move(state));
  }
  const int shard_index = env.rank / shard;
  const int replica_index = env.rank % shard;
  FS_ASSIGN_OR_RETURN(
      state->shard_group,
      factory.make(strided(absl::StrCat("shard", shard_index), env.rank,
                           shard_index * shard, 1, shard)));
  if (shard == 1) {
    state->replicate_group = state->world;
    return ProcessGroups(std::move(state));
  }
  FS_ASSIGN_OR_RETURN(
      state->replicate_group,
      factory.make(strided(absl::StrCat("replicate", replica_index), env.rank,
                           replica_index, shard, world / shard)));
  return ProcessGroups(std::move(state));
}

absl::StatusOr<ProcessGroups> init_process_groups(
    const absl::StatusOr<LaunchEnv>& env, const ProcessGroupsOptions& options) {
  FS_RETURN_IF_ERROR(env.status());
  return init_process_groups(*env, options);
}

}  // namespace fullshard
