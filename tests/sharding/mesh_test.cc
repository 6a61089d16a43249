// Shard groups x replicate groups: every mesh trains like one process, and the
// hooks and factors of a reduction mean the same on all of them.

#include "fullshard/tests/sharding/mlp.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {
namespace {

using testing::batch;
using testing::expect_equal;
using testing::layer_units;
using testing::Mlp;
using testing::plain_backward;
using testing::sgd;
using testing::shard_mlp;
using testing::state_of;

struct Mesh {
  int num_ranks;
  int shard_group_size;
  const char* backend = "shm";
};

std::ostream& operator<<(std::ostream& out, const Mesh& mesh) {
  return out << mesh.num_ranks / mesh.shard_group_size << "x"
             << mesh.shard_group_size << " " << mesh.backend;
}

void run_mesh(const Mesh& mesh,
              const std::function<void(ProcessGroups& groups)>& body) {
  testing::RunRanksOptions run;
  run.backend = mesh.backend;
  run.shard_group_size = mesh.shard_group_size;
  testing::run_ranks(mesh.num_ranks, body, run);
}

class MeshTest : public ::testing::TestWithParam<Mesh> {};

INSTANTIATE_TEST_SUITE_P(Meshes, MeshTest,
                         ::testing::Values(Mesh{1, 1}, Mesh{4, 4}, Mesh{4, 1},
                                           Mesh{4, 2}, Mesh{2, 1}, Mesh{3, 1},
                                           Mesh{8, 4}, Mesh{4, 2, "gloo"},
                                           Mesh{2, 1, "gloo"}));

TEST_P(MeshTest, TrainsLikeOneProcess) {
  run_mesh(GetParam(), [](ProcessGroups& groups) {
    for (auto strategy : {ShardingStrategy::kHybridShard,
                          ShardingStrategy::kHybridShardZero2}) {
      ShardOptions options = layer_units();
      options.strategy = strategy;
      testing::expect_trains_like_one_process(groups, options);
    }
  });
}

// Twice the mean's divisor: half the gradient, on every mesh.
TEST_P(MeshTest, GradientDivideFactor) {
  run_mesh(GetParam(), [](ProcessGroups& groups) {
    ShardOptions options = layer_units();
    options.strategy = ShardingStrategy::kHybridShard;
    options.gradient_divide_factor = 2.0 * groups.world_size();
    auto sharded = shard_mlp(groups, options);
    Mlp plain;
    sharded(batch(groups.rank())).sum().backward();
    plain_backward(plain, groups.world_size());
    for (auto& p : plain.parameters()) p.mutable_grad().div_(2);
    sgd(sharded), sgd(plain);
    expect_equal(state_of(sharded), state_of(plain));
  });
}

// Reduce-scatter every micro-batch, all-reduce over the replicas once.
TEST_P(MeshTest, LateAllReduce) {
  run_mesh(GetParam(), [](ProcessGroups& groups) {
    ShardOptions options = layer_units();
    options.strategy = ShardingStrategy::kHybridShard;
    auto sharded = shard_mlp(groups, options);
    Mlp plain;
    for (int step = 0; step < 2; ++step) {
      sharded.zero_grad(), plain.zero_grad();
      for (int i = 0; i < 3; ++i) {
        sharded.set_requires_all_reduce(i == 2);
        sharded(batch(groups.rank(), i)).sum().backward();
        plain_backward(plain, groups.world_size(), i);
      }
      sgd(sharded), sgd(plain);
    }
    expect_equal(state_of(sharded), state_of(plain));
  });
}

TEST_P(MeshTest, ReduceAndAllReduceHooks) {
  run_mesh(GetParam(), [](ProcessGroups& groups) {
    int num_reduced = 0, num_all_reduced = 0;
    const double ranks = groups.world_size();
    ShardOptions options = layer_units();
    options.strategy = ShardingStrategy::kHybridShard;
    // What the built-in reduction does, written by hand.
    options.reduce_hook = [&](const std::string&, at::Tensor& gradients,
                              at::Tensor& shard) {
      ++num_reduced;
      groups.shard_group()->_reduce_scatter_base(shard, gradients)->wait();
      shard.div_(ranks);
    };
    options.all_reduce_hook = [&](const std::string&, at::Tensor& shard) {
      ++num_all_reduced;
      if (groups.replicate_group()->getSize() == 1) return;
      std::vector<at::Tensor> tensors = {shard};
      groups.replicate_group()->allreduce(tensors)->wait();
    };
    auto sharded = shard_mlp(groups, options);
    Mlp plain;
    for (int i = 0; i < 2; ++i) {
      sharded(batch(groups.rank(), i)).sum().backward();
      plain_backward(plain, groups.world_size(), i);
    }
    EXPECT_EQ(num_reduced, 8);
    EXPECT_EQ(num_all_reduced, 8);
    sgd(sharded), sgd(plain);
    expect_equal(state_of(sharded), state_of(plain));
  });
}

// Compression to half the bytes is a dtype, not a hook.
TEST_P(MeshTest, CompressedReduction) {
  run_mesh(GetParam(), [](ProcessGroups& groups) {
    ShardOptions options = layer_units();
    options.strategy = ShardingStrategy::kHybridShard;
    options.mixed_precision.reduce_dtype = at::kBFloat16;
    auto sharded = shard_mlp(groups, options);
    Mlp plain;
    sharded(batch(groups.rank())).sum().backward();
    plain_backward(plain, groups.world_size());
    sgd(sharded), sgd(plain);
    expect_equal(state_of(sharded), state_of(plain), 2e-2, 2e-2);
  });
}

// Parameters and buffers of rank 0 reach every rank of every group.
TEST_P(MeshTest, SyncModuleStates) {
  run_mesh(GetParam(), [](ProcessGroups& groups) {
    auto model = std::make_shared<Mlp>();
    {
      at::NoGradGuard no_grad;
      model->running.fill_(groups.rank() == 0 ? 3 : 100 + groups.rank());
      for (auto& p : model->parameters()) p.add_(groups.rank());
    }
    ShardOptions options = layer_units();
    options.strategy = ShardingStrategy::kHybridShard;
    options.sync_module_states = true;
    auto sharded = fully_shard(model, groups, options).value();
    Mlp plain;
    plain.running.fill_(3);
    expect_equal(state_of(sharded), state_of(plain));
    EXPECT_TRUE(model->running.equal(plain.running));
  });
}

// The gradient as a whole is [3, 4, 12]: norm 13 on every rank.
TEST_P(MeshTest, ClipOfAKnownGradient) {
  run_mesh(GetParam(), [](ProcessGroups& groups) {
    struct Dot : torch::nn::Module {
      at::Tensor w = register_parameter("w", at::zeros({3}));
      at::Tensor forward(const at::Tensor& x) { return (w * x).sum(); }
    };
    ShardOptions options;
    options.strategy = ShardingStrategy::kHybridShard;
    auto sharded =
        fully_shard(std::make_shared<Dot>(), groups, options).value();
    sharded(at::tensor({3.f, 4.f, 12.f})).backward();
    EXPECT_NEAR(sharded.clip_grad_norm(6.5), 13, 1e-5);
    EXPECT_NEAR(sharded.clip_grad_norm(6.5), 6.5, 1e-5);
    EXPECT_NEAR(sharded.clip_grad_norm(1e9, 1), 9.5, 1e-5);
    EXPECT_NEAR(sharded.clip_grad_norm(1e9, INFINITY), 6, 1e-5);
  });
}

// Shards that fill whole rows of the summation.
TEST(ClipTest, InfiniteNormOfALargeShard) {
  testing::run_ranks(2, [](ProcessGroups& groups) {
    auto sharded =
        fully_shard(
            torch::nn::Linear(torch::nn::LinearOptions(64, 64).bias(false)),
            groups)
            .value();
    sharded(at::arange(64, at::kFloat).view({1, 64})).sum().backward();
    EXPECT_EQ(sharded.clip_grad_norm(1e9, INFINITY), 63);
  });
}

}  // namespace
}  // namespace fullshard
