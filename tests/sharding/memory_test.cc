// What sharding allocates: the bounds of SHARDING, on the library's own figures
// and on the process.

#include <malloc.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>

#include "fullshard/core/launcher.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/allocation_counter.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {
namespace {

using testing::run_ranks;
using testing::RunRanksOptions;

// Equal blocks and a parameter of the root's own.
struct Blocks : torch::nn::Module {
  Blocks(int num_blocks, int64_t width) {
    for (int i = 0; i < num_blocks; ++i) {
      layers.push_back(register_module(
          "block" + std::to_string(i),
          torch::nn::Linear(
              torch::nn::LinearOptions(width, width).bias(false))));
    }
    scale = register_parameter("scale", at::ones({width}));
  }
  at::Tensor forward(at::Tensor x) {
    x = x * scale;
    for (auto& layer : layers) {
      x = at::tanh(layer(x));
      if (at_block) {
        at_block();
        if (x.requires_grad()) {
          x.register_hook([this](const at::Tensor&) { at_gradient(); });
        }
      }
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  at::Tensor scale;
  std::function<void()> at_block, at_gradient;
};

FullyShardedModule<Blocks> shard_blocks(ProcessGroups& groups, int num_blocks,
                                        int64_t width) {
  ShardOptions options;
  options.wrap_policy = module_type<torch::nn::LinearImpl>();
  return fully_shard(std::make_shared<Blocks>(num_blocks, width), groups,
                     options)
      .value();
}

// S: this rank's shards, U: the largest unit, X: what is outside blocks.
struct Sizes {
  explicit Sizes(const ShardedModule& sharded) {
    for (const UnitInfo& unit : sharded.units()) {
      S += unit.sharded_bytes;
      if (unit.name == "root") {
        X += unit.unsharded_bytes;
      } else {
        U = std::max(U, unit.unsharded_bytes);
      }
    }
  }
  int64_t S = 0, U = 0, X = 0;
};

// The figures of all ranks together, for one rank.
int64_t mean_over_ranks(ProcessGroups& groups, int64_t value) {
  std::vector<at::Tensor> tensors = {at::full({1}, value, at::kLong)};
  groups.world()->allreduce(tensors)->wait();
  return tensors[0].item<int64_t>() / groups.world_size();
}

TEST(MemoryTest, EightEqualUnitsStayWithinTheBounds) {
  for (const char* backend : {"shm", "gloo"}) {
    for (int ranks : {2, 4}) {
      RunRanksOptions run;
      run.backend = backend;
      run_ranks(
          ranks,
          [](ProcessGroups& groups) {
            auto sharded = shard_blocks(groups, 8, 64);
            const Sizes sizes(sharded);
            const auto [S, U, X] = std::tie(sizes.S, sizes.U, sizes.X);
            // Slots are rounded up to cache lines.
            const int64_t rounding = 64 * 16;
            const auto now = [&] { return sharded.memory_use().total(); };
            EXPECT_LE(mean_over_ranks(groups, sharded.memory_use().masters), S);
            int64_t forward = 0, backward = 0;
            sharded->at_block = [&] { forward = std::max(forward, now()); };
            sharded->at_gradient = [&] {
              backward = std::max(backward, now());
            };
            ShardedAdamW optimizer(sharded);
            for (int step = 0; step < 3; ++step) {
              forward = backward = 0;
              sharded(at::ones({2, 64})).sum().backward();
              optimizer.step();
              optimizer.zero_grad();
              const int64_t gradients = sharded.memory_use().gradients;
              const int64_t buffers = sharded.memory_use().reduce_buffers;
              // From the second step on gradient shards and reduce buffers of
              // the last one are still there.
              EXPECT_LE(mean_over_ranks(groups, forward),
                        S + 2 * U + X + rounding +
                            (step == 0 ? buffers : gradients + buffers));
              EXPECT_LE(mean_over_ranks(groups, backward),
                        2 * S + 4 * U + X + rounding);
            }
            const MemoryUse use = sharded.memory_use();
            EXPECT_EQ(use.kept_gradients, 0);
            // Adam keeps two more.
            EXPECT_LE(mean_over_ranks(groups, use.masters + use.gradients),
                      2 * S);
          },
          run);
    }
  }
}

// All that LibTorch allocates, activations and autograd's gradients among it.
TEST(MemoryTest, AllocationsStayWithinThePlan) {
  for (bool half : {false, true}) {
    testing::expect_success(
        testing::collect_processes(1, [half](const LaunchEnv&) {
          LaunchEnv env;
          env.world_size = env.local_world_size = 4;
          ProcessGroupsOptions fake;
          fake.backend = "fake";
          ProcessGroups groups = init_process_groups(env, fake).value();
          const testing::AllocationCounter allocations;
          ShardOptions options;
          options.wrap_policy = module_type<torch::nn::LinearImpl>();
          if (half) {
            options.mixed_precision.param_dtype = at::kBFloat16;
            options.mixed_precision.reduce_dtype = at::kFloat;
          }
          auto sharded =
              fully_shard(std::make_shared<Blocks>(8, 256), groups, options)
                  .value();
          ShardedAdamW optimizer(sharded);
          const Plan plan = sharded.plan();
          const at::Tensor x = at::ones({2, 256});
          const int64_t activations = 64 << 10;
          for (int step = 0; step < 3; ++step) {
            sharded(x).sum().backward();
            EXPECT_LE(allocations.peak(), plan.peak_bytes + activations);
            optimizer.step();
            optimizer.zero_grad(/*set_to_none=*/true);
          }
          // Not a bound that anything would keep.
          EXPECT_GT(allocations.peak(), plan.peak_bytes * 2 / 3);
        }));
  }
}

TEST(MemoryTest, InitOnTheMetaDeviceHoldsOneUnitInFull) {
  testing::expect_success(testing::collect_processes(1, [](const LaunchEnv&) {
    LaunchEnv env;
    env.world_size = env.local_world_size = 4;
    ProcessGroupsOptions fake;
    fake.backend = "fake";
    ProcessGroups groups = init_process_groups(env, fake).value();
    auto model = std::make_shared<Blocks>(8, 256);
    testing::move_to_meta(*model);
    ShardOptions options;
    options.wrap_policy = module_type<torch::nn::LinearImpl>();
    options.materialize = [](const std::string&, torch::nn::Module& module) {
      for (at::Tensor& p : module.parameters(/*recurse=*/false)) {
        p.fill_(1);
      }
    };
    const testing::AllocationCounter allocations;
    auto sharded = fully_shard(model, groups, options).value();
    const Plan plan = sharded.plan();
    EXPECT_LE(allocations.peak(), plan.init_bytes + 4096);
    // That is a third of the model.
    EXPECT_LE(allocations.peak(), plan.total.storage_bytes * 2 / 5);
  }));
}

TEST(MemoryTest, GradientsAreFreedOnRequest) {
  for (const char* backend : {"shm", "gloo"}) {
    RunRanksOptions run;
    run.backend = backend;
    run_ranks(
        2,
        [](ProcessGroups& groups) {
          at::manual_seed(1);
          auto freed = shard_blocks(groups, 2, 16);
          at::manual_seed(1);
          auto kept = shard_blocks(groups, 2, 16);
          ShardedAdamW freeing(freed), keeping(kept);
          // As an optimizer of torch::optim would hold them.
          const auto locals = freed.named_local_parameters();
          kept.named_local_parameters();
          const int64_t before = freed.memory_use().gradients;
          EXPECT_EQ(before, 0);
          for (int step = 0; step < 3; ++step) {
            for (auto* model : {&freed, &kept}) {
              (*model)(at::ones({2, 16}) * (1 + groups.rank()))
                  .sum()
                  .backward();
            }
            EXPECT_TRUE(locals[0].tensor.grad().defined());
            freeing.step(), keeping.step();
            freeing.zero_grad(/*set_to_none=*/true), keeping.zero_grad();
            EXPECT_FALSE(locals[0].tensor.grad().defined());
            EXPECT_EQ(freed.memory_use().gradients, 0);
            EXPECT_GT(kept.memory_use().gradients, 0);
          }
          for (size_t i = 0; i < locals.size(); ++i) {
            EXPECT_TRUE(locals[i].tensor.equal(
                kept.named_local_parameters()[i].tensor));
          }
        },
        run);
  }
}

int num_descriptors() {
  using std::filesystem::directory_iterator;
  return static_cast<int>(
      std::distance(directory_iterator("/proc/self/fd"), directory_iterator()));
}

TEST(MemoryTest, HundredUnitsNeedNoMoreGroupsThanOne) {
  RunRanksOptions run;
  run.backend = "gloo";
  run_ranks(
      2,
      [](ProcessGroups& groups) {
        const int before = num_descriptors();
        auto one = shard_blocks(groups, 1, 8);
        auto hundred = shard_blocks(groups, 100, 8);
        hundred(at::ones({2, 8})).sum().backward();
        EXPECT_EQ(num_descriptors(), before);
      },
      run);
}

// Memory of this process, shared pages divided by those who map them; without
// the pages of libraries, whose division changes as other processes end.
int64_t proportional_bytes() {
  malloc_trim(0);
  std::ifstream file("/proc/self/smaps_rollup");
  std::string key;
  int64_t kibibytes = 0, sum = 0;
  while (file >> key) {
    if ((key == "Pss_Anon:" || key == "Pss_Shmem:") && file >> kibibytes) {
      sum += kibibytes;
    }
  }
  return sum << 10;
}

TEST(MemoryTest, TheProcessStaysWithinTheBounds) {
  for (const char* backend : {"shm", "gloo"}) {
    RunRanksOptions run;
    run.backend = backend;
    run_ranks(
        2,
        [](ProcessGroups& groups) {
          constexpr int64_t kWidth = 1024;
          const at::Tensor x = at::ones({4, kWidth});
          {  // What LibTorch needs for itself.
            Blocks warm_up(2, kWidth);
            warm_up.forward(x).sum().backward();
          }
          groups.world()->barrier()->wait();
          const int64_t before = proportional_bytes();
          auto sharded = shard_blocks(groups, 8, kWidth);
          const Sizes sizes(sharded);
          const int64_t slack = 6 << 20;
          groups.world()->barrier()->wait();
          EXPECT_LE(proportional_bytes() - before, sizes.S + sizes.U + slack);
          ShardedAdamW optimizer(sharded);
          for (int step = 0; step < 3; ++step) {
            sharded(x).sum().backward();
            optimizer.step();
            optimizer.zero_grad();
          }
          groups.world()->barrier()->wait();
          // Shards, their gradients, two moments; slots; reduce buffers. Gloo's
          // threads keep buffers of their own.
          const int64_t of_gloo = groups.backend() == "gloo" ? 4 * sizes.U : 0;
          EXPECT_LE(proportional_bytes() - before,
                    4 * sizes.S + 4 * sizes.U + sizes.X + slack + of_gloo);
          groups.world()->barrier()->wait();
        },
        run);
  }
}

// Some faults are the kernel's own doing, under load.
TEST(MemoryTest, StepsTouchNoNewPages) {
  const auto body = [](const LaunchEnv& env) {
    absl::StatusOr<ProcessGroups> groups = init_process_groups(env);
    auto sharded = shard_blocks(*groups, 8, 256);
    ShardedAdamW optimizer(sharded);
    const auto faults = [] {
      rusage usage{};
      getrusage(RUSAGE_SELF, &usage);
      return usage.ru_minflt;
    };
    int64_t before = 0;
    for (int step = 0; step < 60; ++step) {
      if (step == 20) before = faults();
      sharded(at::ones({2, 256})).sum().backward();
      sharded.clip_grad_norm(1);
      optimizer.step();
      optimizer.zero_grad();
    }
    std::printf("rank %d: %d page faults in 40 steps\n", env.rank,
                static_cast<int>(faults() - before));
    return faults() - before < 400 ? 0 : 1;  // Thousands without it.
  };
  const auto outcome = testing::collect_processes(1, [&](const LaunchEnv&) {
    const int status = launch_ranks({}, body);
    std::fflush(nullptr);
    _exit(status);
  })[0];
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
}

}  // namespace
}  // namespace fullshard
