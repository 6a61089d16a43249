// Host cost of sharding per unit and step: forward and backward of twelve units
// of nine small parameters, plain and sharded over a group of eight whose
// collectives do nothing. The difference, divided by the units, is what a unit
// costs: compare the counter per_unit of the two. In the same way per_tensor is
// what autograd pays to save and unpack a tensor that belongs to no unit,
// before and after the engine with our hooks is installed.

#include <benchmark/benchmark.h>

#include "ATen/Parallel.h"
#include "ATen/ops/full.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/sigmoid.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/core/saved_tensor_hooks.h"
#include "fullshard/core/single_backend.h"
#include "fullshard/sharding/fully_shard.h"

namespace fullshard {
namespace {

constexpr int kUnits = 12;
constexpr int64_t kWidth = 8;
constexpr int kRanks = 8;

// Says that it is rank 0 of eight and moves nothing.
class IdleBackend : public c10d::Backend {
 public:
  IdleBackend() : Backend(/*rank=*/0, kRanks) {}
  const std::string getBackendName() const override { return "idle"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions&) override {
    // The comparison of the ranks' orders: all agree.
    if (output.scalar_type() == at::kLong) {
      output.view({kRanks, -1}).copy_(input);
    }
    return done();
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return done();
  }

 private:
  struct Done : c10d::Work {
    bool wait(std::chrono::milliseconds) override { return true; }
  };
  static c10::intrusive_ptr<c10d::Work> done() {
    return c10::make_intrusive<Done>();
  }
};

// As a Llama block: seven matrices and two norms.
struct Block : torch::nn::Module {
  Block() {
    const char* names[] = {"n1", "n2", "q", "k", "v", "o", "g", "u", "d"};
    for (const char* name : names) {
      p.push_back(register_parameter(
          name, name[0] == 'n' ? at::full({kWidth}, 1.0 / kWidth)
                               : at::full({kWidth, kWidth}, 1.0 / kWidth)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    at::Tensor h = x * p[0];
    x = x + at::linear(
                at::linear(h, p[2]) * at::linear(h, p[3]) + at::linear(h, p[4]),
                p[5]);
    h = x * p[1];
    return x + at::linear(at::linear(h, p[6]) * at::linear(h, p[7]), p[8]);
  }
  std::vector<at::Tensor> p;
};

struct Net : torch::nn::Module {
  Net() {
    for (int i = 0; i < kUnits; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i),
                                       std::make_shared<Block>()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = block->forward(x);
    return x.sum();
  }
  std::vector<std::shared_ptr<Block>> blocks;
};

void count_units(benchmark::State& state) {
  state.counters["per_unit"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * kUnits,
      benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

// A chain of operators that save one tensor each.
void save_tensors(benchmark::State& state) {
  constexpr int kTensors = 100;
  at::set_num_threads(1);
  const at::Tensor x = at::ones({1, kWidth}).set_requires_grad(true);
  for (auto _ : state) {
    at::Tensor y = x;
    for (int i = 0; i < kTensors; ++i) y = at::sigmoid(y);
    y.sum().backward();
    x.mutable_grad() = at::Tensor();
  }
  state.counters["per_tensor"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * kTensors,
      benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

// Before any benchmark that shards: the engine stays installed.
void BM_SavedTensor_Plain(benchmark::State& state) { save_tensors(state); }
BENCHMARK(BM_SavedTensor_Plain);

void BM_Step_Plain(benchmark::State& state) {
  at::set_num_threads(1);
  Net net;
  const at::Tensor x = at::ones({1, kWidth});
  for (auto _ : state) {
    net.forward(x).backward();
    for (auto& p : net.parameters()) p.mutable_grad() = at::Tensor();
  }
  count_units(state);
}
BENCHMARK(BM_Step_Plain);

void BM_Step_Sharded(benchmark::State& state) {
  at::set_num_threads(1);
  LaunchEnv env;
  env.world_size = env.local_world_size = kRanks;
  auto group = c10::make_intrusive<IdleBackend>();
  ProcessGroups groups(env, "idle", c10::kCPU, group, group,
                       c10::make_intrusive<SingleBackend>());
  ShardOptions options;
  options.wrap_policy = module_type<Block>();
  auto sharded = fully_shard(std::make_shared<Net>(), groups, options).value();
  const at::Tensor x = at::ones({1, kWidth});
  for (auto _ : state) {
    sharded(x).backward();
    sharded.zero_grad();
  }
  count_units(state);
}
BENCHMARK(BM_Step_Sharded);

void BM_SavedTensor_Hooked(benchmark::State& state) {
  internal::install_engine();
  save_tensors(state);
}
BENCHMARK(BM_SavedTensor_Hooked);

}  // namespace
}  // namespace fullshard
