// Shards a module of its own over two ranks and trains it, as a program outside
// the FullShard repository would.

#include <cstdio>

#include "fullshard/core/launcher.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/sharding/wrap_policy.h"
#include "fullshard/strategy.h"
#include "torch/nn/functional/loss.h"
#include "torch/nn/modules/linear.h"
#include "torch/utils.h"

namespace {

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t in, int64_t out)
      : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  at::Tensor forward(const at::Tensor& x) { return linear(x).tanh(); }

  torch::nn::Linear linear;
};

struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", std::make_shared<BlockImpl>(8, 33))),
        second(register_module("second", std::make_shared<BlockImpl>(33, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    return second->forward(first->forward(x));
  }

  std::shared_ptr<BlockImpl> first, second;
};

int train(const fullshard::LaunchEnv& env) {
  auto groups = fullshard::init_process_groups(env);
  if (!groups.ok()) {
    std::fprintf(stderr, "%s\n", groups.status().ToString().c_str());
    return 1;
  }
  torch::manual_seed(0);  // All ranks start from the same parameters.
  fullshard::ShardOptions options;
  options.wrap_policy = fullshard::module_type<BlockImpl>();
  auto net =
      fullshard::fully_shard(std::make_shared<NetImpl>(), *groups, options);
  if (!net.ok()) {
    std::fprintf(stderr, "%s\n", net.status().ToString().c_str());
    return 1;
  }
  fullshard::StrategyConfig settings;  // Of the whole training strategy.
  settings.learning_rate = 1e-2;
  fullshard::AdamWOptions adamw;
  adamw.lr = settings.learning_rate;
  adamw.weight_decay = settings.weight_decay;
  fullshard::ShardedAdamW optimizer(*net, adamw);

  torch::manual_seed(1 + env.rank);  // Each rank has data of its own.
  const at::Tensor inputs = torch::randn({16, 8});
  const at::Tensor targets = inputs.slice(1, 0, 4).sin();
  auto loss = [&] { return torch::mse_loss((*net)(inputs), targets); };
  const at::Tensor before = loss();
  before.backward();
  net->clip_grad_norm(1.0);
  optimizer.step();
  const double after = loss().item<double>();
  if (env.rank == 0) {
    std::printf("loss before the step %.4f, after it %.4f\n",
                before.item<double>(), after);
  }
  return after < before.item<double>() ? 0 : 1;
}

}  // namespace

int main() {
  fullshard::LauncherOptions options;
  options.num_ranks = 2;
  return fullshard::launch_ranks(options, train);
}
