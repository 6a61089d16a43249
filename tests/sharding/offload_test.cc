// Master shards, gradients and optimizer state in host memory.

#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/sharded_state.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/counting_backend.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::batch;
using testing::CountingBackend;
using testing::expect_equal;
using testing::layer_units;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::shard_mlp;
using testing::state_of;

ShardOptions offloaded() {
  ShardOptions options = layer_units();
  options.offload = true;
  return options;
}

// Steps with clipping, accumulation with and without sync, and state.
void expect_same_as_without(ProcessGroups& groups, ShardOptions options) {
  options.offload = true;
  auto with = shard_mlp(groups, options);
  options.offload = false;
  auto without = shard_mlp(groups, options);
  ShardedAdamW first(with), second(without);
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < 3; ++i) {
      for (ShardedModule* sharded : {static_cast<ShardedModule*>(&with),
                                     static_cast<ShardedModule*>(&without)}) {
        sharded->set_requires_gradient_sync(i != 1);
      }
      with(batch(groups.rank(), i)).sum().backward();
      without(batch(groups.rank(), i)).sum().backward();
    }
    EXPECT_NEAR(with.clip_grad_norm(0.5), without.clip_grad_norm(0.5), 1e-6);
    first.step(), second.step();
    first.zero_grad(), second.zero_grad();
  }
  expect_equal(state_of(with), state_of(without), 1e-6, 1e-7);
}

TEST(OffloadTest, TrainsAsWithout) {
  for (const char* backend : {"shm", "gloo"}) {
    for (int ranks : {1, 2, 3}) {
      RunRanksOptions run;
      run.backend = backend;
      run_ranks(
          ranks,
          [](ProcessGroups& groups) {
            for (auto strategy :
                 {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
                  ShardingStrategy::kNoShard}) {
              ShardOptions options = layer_units();
              options.strategy = strategy;
              expect_same_as_without(groups, options);
            }
          },
          run);
    }
  }
}

// Refuses what a GPU's backend would: tensors in the memory of `offloaded`.
struct DeviceBackend : CountingBackend {
  using CountingBackend::CountingBackend;

  void check(const at::Tensor& tensor) const {
    const auto* at = static_cast<const char*>(tensor.const_data_ptr());
    for (const at::Tensor& host : *offloaded) {
      const auto* begin = static_cast<const char*>(host.const_data_ptr());
      TORCH_CHECK(at < begin || at >= begin + host.nbytes(),
                  "a collective was given host memory");
    }
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    check(output), check(input);
    return CountingBackend::_allgather_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    check(output), check(input);
    return CountingBackend::_reduce_scatter_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override {
    check(tensors.at(0));
    return CountingBackend::allreduce(tensors, options);
  }

  const std::vector<at::Tensor>* offloaded = nullptr;
};

TEST(OffloadTest, CollectivesNeverSeeHostMemory) {
  run_ranks(2, [](ProcessGroups& real) {
    auto backend = c10::make_intrusive<DeviceBackend>(real.world());
    std::vector<at::Tensor> host;
    backend->offloaded = &host;
    ProcessGroups groups(real.env(), "shm", real.device(), backend, backend,
                         real.replicate_group());
    auto sharded = shard_mlp(groups, offloaded());
    for (const auto& unit : sharded.state()->units()) {
      for (const auto& flat : unit->flats) {
        host.push_back(flat->master_shard());
        host.push_back(flat->gradient_shard());
      }
    }
    ShardedAdamW optimizer(sharded);
    for (int step = 0; step < 2; ++step) {
      sharded(batch(groups.rank())).sum().backward();
      sharded.clip_grad_norm(1);
      optimizer.step();
      optimizer.zero_grad();
    }
    state_of(sharded);
    EXPECT_GT(backend->count("all_gather").num_calls, 0);
    EXPECT_GT(backend->count("reduce_scatter").num_calls, 0);
    EXPECT_GT(backend->count("all_reduce").num_calls, 0);
  });
}

}  // namespace
}  // namespace fullshard
