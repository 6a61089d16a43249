// Clip by norm and AdamW, one thread: ours over the flat shards of a model on
// one rank, against what torch.optim does with fused=True (foreach norms, a
// multiplication, the fused kernel) and against LibTorch's own AdamW, on one
// array of 124 million elements and on 1,000 parameters of 1,000. `Mixed` has
// weight decay on every other parameter, so that nothing is contiguous.

#include <benchmark/benchmark.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/_foreach_add.h"
#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/_foreach_norm.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/full.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/ones_like.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "c10/core/GradMode.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/optim/ema.h"
#include "fullshard/optim/grad_clip.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "torch/nn/utils/clip_grad.h"
#include "torch/optim/adamw.h"

namespace fullshard {
namespace {

constexpr double kMaxNorm = 1e-3;  // Always clips.

struct Shape {
  int64_t num_tensors;
  int64_t numel;
  bool mixed_decay;
};
constexpr Shape kFlat124M{1, 124'000'000, false};
constexpr Shape kSmall{1000, 1000, false};
constexpr Shape kMixed{1000, 1000, true};

bool decays(const Shape& shape, int64_t i) {
  return !shape.mixed_decay || i % 2 == 0;
}

struct Net : torch::nn::Module {
  explicit Net(const Shape& shape) {
    for (int64_t i = 0; i < shape.num_tensors; ++i) {
      const at::Tensor value = decays(shape, i)
                                   ? at::full({1, shape.numel}, 0.5f)
                                   : at::full({shape.numel}, 0.5f);
      p.push_back(register_parameter("p" + std::to_string(i), value));
    }
  }
  at::Tensor forward() {
    at::Tensor sum = at::zeros({});
    for (const at::Tensor& value : p) sum = sum + value.sum();
    return sum;
  }
  std::vector<at::Tensor> p;
};

void count(benchmark::State& state, const Shape& shape) {
  state.SetItemsProcessed(state.iterations() * shape.num_tensors * shape.numel);
}

FullyShardedModule<Net> sharded_with_gradients(const Shape& shape) {
  at::set_num_threads(1);
  const ProcessGroups groups = init_process_groups(LaunchEnv()).value();
  auto sharded = fully_shard(std::make_shared<Net>(shape), groups).value();
  sharded().backward();
  return sharded;
}

void ours(benchmark::State& state, const Shape& shape) {
  auto sharded = sharded_with_gradients(shape);
  ShardedAdamW optimizer(sharded);
  for (auto _ : state) {
    benchmark::DoNotOptimize(sharded.clip_grad_norm(kMaxNorm));
    optimizer.step();
  }
  count(state, shape);
}

void our_clip_by_group(benchmark::State& state, const Shape& shape) {
  auto sharded = sharded_with_gradients(shape);
  ShardedAdamW optimizer(sharded);
  for (auto _ : state) {
    benchmark::DoNotOptimize(clip_grad_norms(sharded, kMaxNorm));
    optimizer.step();
  }
  count(state, shape);
}

void ema(benchmark::State& state, const Shape& shape) {
  auto sharded = sharded_with_gradients(shape);
  ShardedEma average(sharded, /*half_life_steps=*/1000);
  for (auto _ : state) average.update();
  count(state, shape);
}

// The tensors of a parameter list, split by decay.
struct Lists {
  std::vector<at::Tensor> parameters, gradients, first, second, steps;
  void add(const Shape& shape) {
    parameters.push_back(at::full({shape.numel}, 0.5f));
    gradients.push_back(at::ones_like(parameters.back()));
    first.push_back(at::zeros_like(parameters.back()));
    second.push_back(at::zeros_like(parameters.back()));
    steps.push_back(at::zeros({}));
  }
};

// As torch.nn.utils.clip_grad_norm_ and torch.optim.AdamW(fused=True) do.
void torch_fused(benchmark::State& state, const Shape& shape) {
  at::set_num_threads(1);
  at::NoGradGuard no_grad;
  Lists lists[2];
  for (int64_t i = 0; i < shape.num_tensors; ++i) {
    lists[decays(shape, i) ? 1 : 0].add(shape);
  }
  std::vector<at::Tensor> all = lists[0].gradients;
  all.insert(all.end(), lists[1].gradients.begin(), lists[1].gradients.end());
  for (auto _ : state) {
    const at::Tensor norm =
        at::linalg_vector_norm(at::stack(at::_foreach_norm(all)), 2);
    at::_foreach_mul_(all, (kMaxNorm / (norm + 1e-6)).clamp_max(1));
    for (int decay = 0; decay < 2; ++decay) {
      Lists& l = lists[decay];
      if (l.parameters.empty()) continue;
      at::_foreach_add_(l.steps, 1);
      at::_fused_adamw_(l.parameters, l.gradients, l.first, l.second, {},
                        l.steps, 1e-3, 0.9, 0.999, decay ? 0.01 : 0.0, 1e-8,
                        /*amsgrad=*/false, /*maximize=*/false);
    }
  }
  count(state, shape);
}

void torch_cpp(benchmark::State& state, const Shape& shape) {
  at::set_num_threads(1);
  Net net(shape);
  for (at::Tensor& p : net.p) p.mutable_grad() = at::ones_like(p);
  std::vector<at::Tensor> decayed, others;
  for (at::Tensor& p : net.p) (p.dim() > 1 ? decayed : others).push_back(p);
  using Options = torch::optim::AdamWOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed,
                      std::make_unique<Options>(Options().weight_decay(0.01)));
  groups.emplace_back(others,
                      std::make_unique<Options>(Options().weight_decay(0)));
  torch::optim::AdamW optimizer(groups);
  for (auto _ : state) {
    torch::nn::utils::clip_grad_norm_(net.p, kMaxNorm);
    optimizer.step();
  }
  count(state, shape);
}

#define FULLSHARD_BENCHMARK(name, function)           \
  BENCHMARK_CAPTURE(function, Flat124M, kFlat124M)    \
      ->Name("BM_" name "_Flat124M")                  \
      ->Unit(benchmark::kMillisecond);                \
  BENCHMARK_CAPTURE(function, Small1000x1000, kSmall) \
      ->Name("BM_" name "_Small1000x1000")            \
      ->Unit(benchmark::kMillisecond);                \
  BENCHMARK_CAPTURE(function, Mixed1000x1000, kMixed) \
      ->Name("BM_" name "_Mixed1000x1000")            \
      ->Unit(benchmark::kMillisecond)

FULLSHARD_BENCHMARK("ClipAdamW_Sharded", ours);
FULLSHARD_BENCHMARK("ClipAdamW_ShardedClipGradNorms", our_clip_by_group);
FULLSHARD_BENCHMARK("ClipAdamW_TorchFused", torch_fused);
FULLSHARD_BENCHMARK("ClipAdamW_TorchCpp", torch_cpp);
FULLSHARD_BENCHMARK("Ema_Sharded", ema);

}  // namespace
}  // namespace fullshard
