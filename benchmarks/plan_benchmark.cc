// Time and memory of a plan of a 70B decoder over 16,384 ranks.

#include <malloc.h>

#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "fullshard/sharding/plan.h"

namespace fullshard {
namespace {

std::vector<PlanUnit> decoder_70b() {
  const int64_t d = 8192, kv = 1024, ffn = 28672, vocab = 32000;
  std::vector<PlanUnit> units(1);
  units[0].name = "root";
  units[0].encloses_others = true;
  units[0].parameters = {
      {"embed", vocab * d}, {"norm", d}, {"head", vocab * d}};
  for (int i = 0; i < 80; ++i) {
    PlanUnit layer;
    layer.name = "model.layers." + std::to_string(i);
    for (int64_t numel :
         {d * d, kv * d, kv * d, d * d, ffn * d, ffn * d, ffn * d, d, d}) {
      layer.parameters.push_back({"p", numel});
    }
    units.push_back(std::move(layer));
  }
  return units;
}

void plan_70b(benchmark::State& state) {
  const std::vector<PlanUnit> units = decoder_70b();
  PlanOptions options;
  options.num_shards = 16384;
  options.param_dtype = at::kBFloat16;
  const size_t before = mallinfo2().uordblks;
  Plan plan;
  std::string table;
  for (auto _ : state) {
    plan = make_plan(units, options);
    table = plan.table();
    benchmark::DoNotOptimize(table);
  }
  state.counters["parameters"] = static_cast<double>(plan.total.numel);
  state.counters["heap_bytes"] =
      static_cast<double>(mallinfo2().uordblks - before);
}
BENCHMARK(plan_70b)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace fullshard
