// The optimizer that updates a unit as soon as backward has reduced it.

#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/optim/sharded_sgd.h"
#include "fullshard/sharding/sharded_state.h"
#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::batch;
using testing::expect_equal;
using testing::layer_units;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::shard_mlp;
using testing::state_of;

int num_gradients(const ShardedModule& sharded) {
  int count = 0;
  for (const auto& unit : sharded.state()->units()) {
    for (const auto& flat : unit->flats) count += flat->has_gradient() ? 1 : 0;
  }
  return count;
}

void expect_same_as_after_backward(ProcessGroups& groups,
                                   const ShardOptions& options) {
  auto in_backward = shard_mlp(groups, options);
  auto after = shard_mlp(groups, options);
  ShardedAdamW first(in_backward), second(after);
  first.set_step_in_backward(true);
  for (int step = 0; step < 4; ++step) {
    for (int i = 0; i < 2; ++i) {  // The first micro-batch keeps its gradient.
      in_backward.set_requires_gradient_sync(i == 1);
      after.set_requires_gradient_sync(i == 1);
      in_backward(batch(groups.rank(), 2 * step + i)).sum().backward();
      after(batch(groups.rank(), 2 * step + i)).sum().backward();
    }
    EXPECT_EQ(num_gradients(in_backward), 0);
    first.step(), second.step();
    first.zero_grad(), second.zero_grad();
  }
  expect_equal(state_of(in_backward), state_of(after), 0, 0);
}

TEST(StepInBackwardTest, SameBitsAsAfterBackward) {
  for (const char* backend : {"shm", "gloo"}) {
    for (int ranks : {1, 2, 3}) {
      RunRanksOptions run;
      run.backend = backend;
      run_ranks(
          ranks,
          [](ProcessGroups& groups) {
            ShardOptions options = layer_units();
            expect_same_as_after_backward(groups, options);
            options.mixed_precision.param_dtype = at::kBFloat16;
            options.mixed_precision.buffer_dtype = at::kBFloat16;
            expect_same_as_after_backward(groups, options);
          },
          run);
    }
  }
  RunRanksOptions hybrid;
  hybrid.shard_group_size = 2;
  run_ranks(
      4,
      [](ProcessGroups& groups) {
        ShardOptions options = layer_units();
        options.strategy = ShardingStrategy::kHybridShard;
        expect_same_as_after_backward(groups, options);
      },
      hybrid);
}

TEST(StepInBackwardTest, ClippingIsRefused) {
  run_ranks(1, [](ProcessGroups& groups) {
    auto sharded = shard_mlp(groups);
    {
      ShardedSGD optimizer(sharded);
      optimizer.set_step_in_backward(true);
      sharded(batch(0)).sum().backward();
      try {
        sharded.clip_grad_norm(1);
        ADD_FAILURE() << "expected an error";
      } catch (const c10::Error& error) {
        EXPECT_NE(std::string(error.what()).find("set_step_in_backward"),
                  std::string::npos);
      }
    }
    sharded(batch(0)).sum().backward();  // The optimizer is gone.
    EXPECT_EQ(num_gradients(sharded), 4);
    sharded.clip_grad_norm(1);
  });
}

}  // namespace
}  // namespace fullshard
