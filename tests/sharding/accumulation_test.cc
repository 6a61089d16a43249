// Gradients that several backwards add up, optimizers over some of the
// parameters, and memory over many steps.

#include <malloc.h>

#include <map>

#include "ATen/ATen.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/testing/counting_backend.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/sgd.h"
#include "torch/utils.h"

namespace fullshard {
namespace {

struct Mlp : torch::nn::Module {
  Mlp() {
    at::manual_seed(2);
    for (int i = 0; i < 3; ++i) {
      layers.push_back(
          register_module("l" + std::to_string(i), torch::nn::Linear(5, 5)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = at::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

FullyShardedModule<Mlp> shard(ProcessGroups& groups, bool bf16 = false) {
  ShardOptions options;
  options.wrap_policy = module_type<torch::nn::LinearImpl>();
  if (bf16) {
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.reduce_dtype = at::kFloat;
  }
  return fully_shard(std::make_shared<Mlp>(), groups, options).value();
}

std::map<std::string, at::Tensor> state_of(const ShardedModule& sharded) {
  std::map<std::string, at::Tensor> state;
  EXPECT_TRUE(sharded
                  .full_state_dict(
                      [&](const std::string& name, const at::Tensor& tensor) {
                        state[name] = tensor.clone();
                        return absl::OkStatus();
                      },
                      /*all_ranks=*/true)
                  .ok());
  return state;
}

void expect_equal_state(const ShardedModule& sharded, Mlp& plain, double rtol,
                        double atol) {
  const auto state = state_of(sharded);
  for (auto& item : plain.named_parameters()) {
    EXPECT_TRUE(at::allclose(state.at(item.key()), item.value(), rtol, atol))
        << item.key();
  }
}

at::Tensor batch(int micro_batch, int rank) {
  return at::arange(10, at::kFloat).view({2, 5}).sin() *
         (1 + micro_batch + 3 * rank);
}

// Three micro-batches; bit i of `sync` says whether backward i synchronises,
// the last always does.
void expect_sum_of_micro_batches(ProcessGroups& groups, bool bf16, int sync) {
  auto sharded = shard(groups, bf16);
  Mlp plain;
  const int ranks = groups.world_size();
  for (int step = 0; step < 2; ++step) {
    sharded.zero_grad();
    plain.zero_grad();
    for (int i = 0; i < 3; ++i) {
      for (int rank = 0; rank < ranks; ++rank) {
        (plain.forward(batch(i, rank)).sum() / ranks).backward();
      }
      sharded.set_requires_gradient_sync(i == 2 || (sync >> i & 1) != 0);
      sharded(batch(i, groups.rank())).sum().backward();
    }
    at::NoGradGuard no_grad;
    for (auto& p : plain.parameters()) p.sub_(p.grad(), 0.1);
    for (const LocalParameter& local : sharded.named_local_parameters()) {
      local.tensor.sub_(local.tensor.grad(), 0.1);
    }
  }
  expect_equal_state(sharded, plain, bf16 ? 3e-2 : 1e-5, bf16 ? 3e-2 : 1e-6);
}

TEST(AccumulationTest, EveryMixOfSyncAndNoSyncIsTheSum) {
  for (int num_ranks : {1, 2, 3}) {
    testing::run_ranks(num_ranks, [](ProcessGroups& groups) {
      for (bool bf16 : {false, true}) {
        for (int sync = 0; sync < 4; ++sync) {
          SCOPED_TRACE(sync);
          expect_sum_of_micro_batches(groups, bf16, sync);
        }
      }
    });
  }
}

TEST(AccumulationTest, NoSyncEndsWithItsScope) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    auto sharded = shard(groups);
    {
      const auto no_sync = sharded.no_sync();
      sharded(batch(0, groups.rank())).sum().backward();
      EXPECT_EQ(sharded.clip_grad_norm(1), 0);  // Nothing is reduced yet.
    }
    sharded(batch(1, groups.rank())).sum().backward();
    EXPECT_GT(sharded.clip_grad_norm(1), 0);
  });
}

// An optimizer's zero_grad() resets only what it was given; the gradients of
// the other parameters go on adding up, as they do in an unsharded model.
TEST(AccumulationTest, OptimizerOverSomeOfTheParameters) {
  for (int num_ranks : {1, 2, 3}) {
    testing::run_ranks(num_ranks, [](ProcessGroups& groups) {
      auto sharded = shard(groups);
      Mlp plain;
      auto is_bias = [](const std::string& name) {
        return name.find("bias") != std::string::npos;
      };
      std::vector<at::Tensor> mine, all;
      for (const LocalParameter& local : sharded.named_local_parameters()) {
        if (is_bias(local.name)) mine.push_back(local.tensor);
      }
      for (auto& item : plain.named_parameters()) {
        if (is_bias(item.key())) all.push_back(item.value());
      }
      torch::optim::SGD expected(all, 0.1);
      std::unique_ptr<torch::optim::SGD> sgd;  // A rank may own no bias.
      if (!mine.empty()) sgd = std::make_unique<torch::optim::SGD>(mine, 0.1);
      for (int step = 0; step < 3; ++step) {
        expected.zero_grad();
        if (sgd) sgd->zero_grad();
        plain.forward(batch(step, 0)).sum().backward();
        sharded(batch(step, 0)).sum().backward();
        expected.step();
        if (sgd) sgd->step();
      }
      expect_equal_state(sharded, plain, 1e-5, 1e-6);
      at::NoGradGuard no_grad;  // The weights' gradients are those of 3 steps.
      for (auto& p : plain.parameters()) p.sub_(p.grad(), 0.1);
      for (const LocalParameter& local : sharded.named_local_parameters()) {
        local.tensor.sub_(local.tensor.grad(), 0.1);
      }
      expect_equal_state(sharded, plain, 1e-5, 1e-6);
    });
  }
}

int64_t bytes_in_use() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

// In shared memory, and through the calls that other backends have. (Gloo's own
// record of collectives grows for its first thousands of calls.)
TEST(AccumulationTest, NothingGrowsOver400Steps) {
  for (bool wrapped : {false, true}) {
    testing::run_ranks(2, [wrapped](ProcessGroups& real) {
      const auto backend =
          wrapped
              ? ProcessGroups::Group(
                    c10::make_intrusive<testing::CountingBackend>(real.world()))
              : real.world();
      ProcessGroups groups(real.env(), "shm", real.device(), backend, backend,
                           real.replicate_group());
      auto sharded = shard(groups);
      ShardedAdamW optimizer(sharded);
      auto step = [&](int i) {
        if (i % 10 == 3) {
          at::NoGradGuard no_grad;
          sharded(batch(i, groups.rank()));
        }
        sharded.set_requires_gradient_sync(i % 3 != 0);
        sharded(batch(i, groups.rank())).sum().backward();
        if (i % 3 == 0) return;
        sharded.clip_grad_norm(1);
        optimizer.step();
        optimizer.zero_grad();
      };
      for (int i = 0; i < 200; ++i) step(i);
      const int64_t before = bytes_in_use();
      for (int i = 200; i < 600; ++i) step(i);
      // Less than the smallest object per step.
      EXPECT_LT(bytes_in_use() - before, 4096) << (wrapped ? "wrapped" : "shm");
    });
  }
}

}  // namespace
}  // namespace fullshard
