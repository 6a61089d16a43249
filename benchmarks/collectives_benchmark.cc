// Collectives in shared memory against Gloo, in one run on the same ranks.
//
//   bazel run -c opt //benchmarks:collectives_benchmark
//
// Prints, for each collective, number of ranks and size of the full tensor, the
// time of one call in milliseconds, and how many times faster than Gloo it is.
// A call's time is that of the slowest rank: the median over rounds of the time
// between two barriers, divided by the calls of a round.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/ones.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/launcher.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/core/shm_backend.h"

namespace fullshard {
namespace {

using Clock = std::chrono::steady_clock;
using Call = std::function<void()>;

constexpr int64_t kMinBytes = 64 << 10;
constexpr int64_t kMaxBytes = 64 << 20;
constexpr int kNumRounds = 5;
constexpr double kRoundSeconds = 0.02;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Returns the milliseconds of one call. Collective.
double measure(c10d::Backend& world, const Call& call) {
  auto round = [&](int num_calls) {
    world.barrier()->wait();
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < num_calls; ++i) call();
    world.barrier()->wait();
    return seconds_since(start) / num_calls;
  };
  round(1);
  // All ranks agree on rank 0's number of calls.
  at::Tensor calls = at::empty({1}, at::kLong);
  *calls.data_ptr<int64_t>() = static_cast<int64_t>(
      std::clamp(std::ceil(kRoundSeconds / round(2)), 1.0, 1000.0));
  std::vector<at::Tensor> news = {calls};
  world.broadcast(news)->wait();
  const int num_calls = static_cast<int>(*calls.data_ptr<int64_t>());
  std::vector<double> times;
  for (int i = 0; i < kNumRounds; ++i) times.push_back(round(num_calls));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3;
}

// Rank 0's results of one collective.
class Row {
 public:
  Row(std::string name, bool print) : name_(std::move(name)), print_(print) {}

  void add(int num_ranks, int64_t num_bytes, double milliseconds, double gloo) {
    log_speedups_ += std::log(gloo / milliseconds);
    ++count_;
    if (!print_) return;
    std::printf("BM_%s/ranks:%d/KiB:%-6lld %12.4f ms %12.4f ms gloo %8.1fx\n",
                name_.c_str(), num_ranks,
                static_cast<long long>(num_bytes >> 10), milliseconds, gloo,
                gloo / milliseconds);
    std::fflush(stdout);
  }
  void print_mean(int num_ranks) const {
    if (!print_) return;
    std::printf("BM_%s/ranks:%d geometric mean %.1fx\n", name_.c_str(),
                num_ranks, std::exp(log_speedups_ / count_));
  }

 private:
  const std::string name_;
  const bool print_;
  double log_speedups_ = 0;
  int count_ = 0;
};

int run_rank(const LaunchEnv& env) {
  ProcessGroupsOptions options;
  options.backend = "gloo";
  absl::StatusOr<ProcessGroups> gloo_groups = init_process_groups(env, options);
  options.backend = "shm";
  absl::StatusOr<ProcessGroups> shm_groups = init_process_groups(env, options);
  if (!gloo_groups.ok() || !shm_groups.ok()) {
    std::fprintf(stderr, "%s %s\n", gloo_groups.status().ToString().c_str(),
                 shm_groups.status().ToString().c_str());
    return 1;
  }
  c10d::Backend& gloo = *gloo_groups->world();
  ShmBackend& shm = *ProcessGroups::shm(shm_groups->world());
  const int n = env.world_size;
  Row gather("AllGather_Shm", env.rank == 0);
  Row pages("AllGather_SharedPages", env.rank == 0);
  Row scatter("ReduceScatter_Shm", env.rank == 0);
  std::unique_ptr<ShmSignals> signals = shm.make_signals(2);
  at::Tensor shared = shm.allocate_shared(kMaxBytes);
  uint32_t step = 0;
  for (int64_t bytes = kMinBytes; bytes <= kMaxBytes; bytes *= 4) {
    at::Tensor full = at::ones({bytes / 4});
    at::Tensor slice = at::ones({bytes / 4 / n});
    auto all_gather = [&](c10d::Backend& group) {
      return measure(shm, [&] { group._allgather_base(full, slice)->wait(); });
    };
    auto reduce_scatter = [&](c10d::Backend& group) {
      return measure(shm,
                     [&] { group._reduce_scatter_base(slice, full)->wait(); });
    };
    // What the sharding engine does: write one's slice where all ranks see it,
    // once all have released what was there before.
    auto share = [&] {
      char* to = static_cast<char*>(shared.data_ptr()) +
                 env.rank * static_cast<int64_t>(slice.nbytes());
      signals->wait_all(1, step, "release");
      std::memcpy(to, slice.const_data_ptr(), slice.nbytes());
      ++step;
      signals->post(0, step);
      signals->wait_all(0, step, "all_gather");
      signals->post(1, step);
    };
    const double gloo_gather = all_gather(gloo);
    gather.add(n, bytes, all_gather(shm), gloo_gather);
    pages.add(n, bytes, measure(shm, share), gloo_gather);
    const double gloo_scatter = reduce_scatter(gloo);
    scatter.add(n, bytes, reduce_scatter(shm), gloo_scatter);
  }
  for (const Row* row : {&gather, &pages, &scatter}) row->print_mean(n);
  return 0;
}

}  // namespace
}  // namespace fullshard

int main() {
  for (int num_ranks : {2, 4, 8}) {
    fullshard::LauncherOptions options;
    options.num_ranks = num_ranks;
    options.threads_per_rank = 1;
    const int status = fullshard::launch_ranks(options, fullshard::run_rank);
    if (status != 0) return status;
  }
  return 0;
}
