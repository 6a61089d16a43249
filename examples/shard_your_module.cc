// Shards a module of your own over two processes and trains it.
//   bazel run //examples:shard_your_module

#include <cstdio>

#include "fullshard/core/launcher.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "torch/nn/modules/linear.h"
#include "torch/utils.h"

// An ordinary module: nothing in it knows of sharding.
struct Regressor : torch::nn::Module {
  Regressor() {
    in = register_module("in", torch::nn::Linear(8, 64));
    out = register_module("out", torch::nn::Linear(64, 1));
  }
  at::Tensor forward(at::Tensor x) { return out(torch::tanh(in(x))); }
  torch::nn::Linear in{nullptr}, out{nullptr};
};

int train(const fullshard::LaunchEnv& env) {
  fullshard::ProcessGroups groups = fullshard::init_process_groups(env).value();
  torch::manual_seed(0);  // All ranks start alike.

  fullshard::ShardOptions options;
  options.wrap_policy = fullshard::module_type<torch::nn::LinearImpl>();
  auto model =
      fullshard::fully_shard(std::make_shared<Regressor>(), groups, options)
          .value();
  fullshard::ShardedAdamW optimizer(model);

  torch::manual_seed(1 + env.rank);  // Each rank has data of its own.
  for (int step = 0; step < 200; ++step) {
    const at::Tensor x = torch::randn({32, 8});
    const at::Tensor loss = (model(x) - x.sum(1, true)).pow(2).mean();
    loss.backward();
    model.clip_grad_norm(1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (env.rank == 0 && step % 50 == 49) {
      std::printf("step %d: loss %.4f\n", step + 1, loss.item<double>());
    }
  }
  return 0;
}

int main() {
  fullshard::LauncherOptions options;
  options.num_ranks = 2;
  return fullshard::launch_ranks(options, train);
}
