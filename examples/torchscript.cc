// Shards a model that Python exported with torch.jit.script(model).save(path)
// and trains it to reproduce its input, over two processes.
//   bazel run //examples:torchscript -- model.ts 16
// The second argument is the width of its input and output, [batch, width].

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "ATen/ops/mse_loss.h"
#include "ATen/ops/randn.h"
#include "fullshard/core/launcher.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/sharding/script_module.h"
#include "torch/utils.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: torchscript MODEL.ts WIDTH\n");
    return 2;
  }
  // `bazel run` starts elsewhere.
  const char* caller = std::getenv("BUILD_WORKING_DIRECTORY");
  if (caller != nullptr && chdir(caller) != 0) return 1;
  const std::string path = argv[1];
  const int64_t width = std::atoll(argv[2]);
  fullshard::LauncherOptions launcher;
  launcher.num_ranks = 2;
  return fullshard::launch_ranks(
      launcher, [&](const fullshard::LaunchEnv& env) {
        auto groups = fullshard::init_process_groups(env).value();
        auto script = fullshard::ScriptModule::load(path);
        if (!script.ok()) {
          std::fprintf(stderr, "%s\n", script.status().ToString().c_str());
          return 2;
        }
        fullshard::ShardOptions options;
        options.wrap_policy = fullshard::script_type("Linear");
        auto model = fullshard::fully_shard(*script, groups, options).value();
        fullshard::ShardedAdamW optimizer(model);
        torch::manual_seed(1 + env.rank);
        for (int step = 0; step < 100; ++step) {
          const at::Tensor x = at::randn({32, width});
          const at::Tensor loss = at::mse_loss(model(x), x);
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
          if (env.rank == 0 && step % 25 == 24) {
            std::printf("step %d: loss %.4f\n", step + 1, loss.item<double>());
          }
        }
        return 0;
      });
}
