#ifndef FULLSHARD_TESTS_SHARDING_MLP_H_
#define FULLSHARD_TESTS_SHARDING_MLP_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "fullshard/sharding/fully_shard.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {
namespace testing {

// Three layers of sizes that divide by nothing, a parameter of the root's own,
// and a buffer. Seeded, so that all are alike.
struct Mlp : torch::nn::Module {
  Mlp() {
    at::manual_seed(7);
    for (int i = 0; i < 3; ++i) {
      layers.push_back(
          register_module("l" + std::to_string(i),
                          torch::nn::Linear(torch::nn::LinearOptions(5, 5))));
    }
    scale = register_parameter("scale", at::rand({5}));
    running = register_buffer("running", at::ones({5}));
  }
  at::Tensor forward(at::Tensor x) {
    x = x * scale + running;
    for (auto& layer : layers) x = at::tanh(layer(x));
    return x;
  }

  std::vector<torch::nn::Linear> layers;
  at::Tensor scale, running;
};

// Takes the memory of all tensors away, as modules are that allocate on the
// meta device.
inline void move_to_meta(const torch::nn::Module& model) {
  const auto to_meta = [](const at::Tensor& tensor) {
    tensor.unsafeGetTensorImpl()->_change_backend_component_keys(at::kMeta);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(
        at::empty(tensor.sizes(), at::kMeta).storage());
  };
  for (const auto& p : model.parameters()) to_meta(p);
  for (const auto& b : model.buffers()) to_meta(b);
}

inline std::shared_ptr<Mlp> meta_mlp() {
  auto model = std::make_shared<Mlp>();
  move_to_meta(*model);
  return model;
}

// The batch of a rank: different on each.
inline at::Tensor batch(int rank, int micro_batch = 0) {
  return at::arange(10, at::kFloat).view({2, 5}).sin() *
         (1 + rank + 3 * micro_batch);
}

// Units: the three layers and the root.
inline ShardOptions layer_units() {
  ShardOptions options;
  options.wrap_policy = module_type<torch::nn::LinearImpl>();
  return options;
}

inline FullyShardedModule<Mlp> shard_mlp(
    const ProcessGroups& groups, const ShardOptions& options = layer_units()) {
  return fully_shard(std::make_shared<Mlp>(), groups, options).value();
}

using State = std::map<std::string, at::Tensor>;

inline State state_of(const ShardedModule& sharded) {
  State state;
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

inline State state_of(const torch::nn::Module& plain) {
  State state;
  for (auto& item : plain.named_parameters()) state[item.key()] = item.value();
  for (auto& item : plain.named_buffers()) state[item.key()] = item.value();
  return state;
}

inline void expect_equal(const State& got, const State& expected,
                         double rtol = 1e-5, double atol = 1e-6) {
  EXPECT_EQ(got.size(), expected.size());
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(got.count(name) == 1) << name;
    EXPECT_TRUE(at::allclose(got.at(name), value, rtol, atol))
        << name << ": expected " << value << ", got " << got.at(name);
  }
}

// p -= 0.1 gradient, for a sharded and for a plain module.
inline void sgd(ShardedModule& sharded) {
  at::NoGradGuard no_grad;
  for (const LocalParameter& local : sharded.named_local_parameters()) {
    if (local.tensor.grad().defined()) {
      local.tensor.sub_(local.tensor.grad(), 0.1);
    }
  }
}
inline void sgd(torch::nn::Module& plain) {
  at::NoGradGuard no_grad;
  for (auto& p : plain.parameters()) {
    if (p.grad().defined()) p.sub_(p.grad(), 0.1);
  }
}

// A step of the plain module on the mean over ranks of the sum of outputs.
inline void plain_backward(Mlp& plain, int num_ranks, int micro_batch = 0) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    (plain.forward(batch(rank, micro_batch)).sum() / num_ranks).backward();
  }
}

// Steps of a sharded Mlp, each rank with a batch of its own, leave what one
// process that sees all batches has.
inline void expect_trains_like_one_process(ProcessGroups& groups,
                                           const ShardOptions& options) {
  auto sharded = shard_mlp(groups, options);
  Mlp plain;
  for (int step = 0; step < 3; ++step) {
    sharded.zero_grad(), plain.zero_grad();
    sharded(batch(groups.rank())).sum().backward();
    plain_backward(plain, groups.world_size());
    sgd(sharded), sgd(plain);
    at::NoGradGuard no_grad;  // Also right between steps.
    EXPECT_TRUE(
        at::allclose(sharded(batch(0)), plain.forward(batch(0)), 1e-5, 1e-6));
  }
  expect_equal(state_of(sharded), state_of(plain));
}

}  // namespace testing
}  // namespace fullshard

#endif  // FULLSHARD_TESTS_SHARDING_MLP_H_
