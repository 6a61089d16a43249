#ifndef FULLSHARD_TESTS_OPTIM_GOLDEN_MODEL_H_
#define FULLSHARD_TESTS_OPTIM_GOLDEN_MODEL_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/remainder.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/sharding/wrap_policy.h"
#include "gtest/gtest.h"
#include "torch/nn/module.h"

namespace fullshard {
namespace testing {

// A weight and a bias; a unit of its own.
struct GoldenPart : torch::nn::Module {
  GoldenPart(std::vector<int64_t> sizes, int64_t place) {
    weight = register_parameter("weight", value(sizes, place));
    bias = register_parameter("bias", value({sizes[0]}, place + 1));
  }
  // (i 29 + place 17) mod 64, in [-1, 1).
  static at::Tensor value(const std::vector<int64_t>& sizes, int64_t place) {
    int64_t numel = 1;
    for (int64_t size : sizes) numel *= size;
    return ((at::arange(numel) * 29 + place * 17).remainder(64) - 32)
        .to(at::kFloat)
        .div(32)
        .view(sizes);
  }
  at::Tensor weight, bias;
};

// The model of goldens/optimizers.py. What backward gives a parameter does not
// depend on its value; `unused` has no gradient at all.
struct GoldenModel : torch::nn::Module {
  GoldenModel() {
    body = register_module(
        "body", std::make_shared<GoldenPart>(std::vector<int64_t>{5, 3}, 0));
    head = register_module(
        "head", std::make_shared<GoldenPart>(std::vector<int64_t>{3, 7}, 2));
    unused = register_module(
        "unused", std::make_shared<GoldenPart>(std::vector<int64_t>{2, 2}, 4));
  }
  // Gradients that are `scale` times those of `step`.
  at::Tensor forward(int64_t step, double scale = 1) {
    const std::vector<at::Tensor> used = {body->weight, body->bias,
                                          head->weight, head->bias};
    at::Tensor loss;
    for (size_t place = 0; place < used.size(); ++place) {
      const at::Tensor term =
          (used[place] *
           gradient(used[place].sizes(), step, static_cast<int64_t>(place)))
              .sum() *
          scale;
      loss = loss.defined() ? loss + term : term;
    }
    return loss;
  }
  static at::Tensor gradient(at::IntArrayRef sizes, int64_t step,
                             int64_t place) {
    return ((at::arange(c10::multiply_integers(sizes)) * 37 + step * 101 +
             place * 53)
                .remainder(64) -
            32)
        .to(at::kFloat)
        .div(64)
        .view(sizes);
  }
  std::shared_ptr<GoldenPart> body, head, unused;
};

inline FullyShardedModule<GoldenModel> shard_golden_model(
    ProcessGroups& groups,
    ShardingStrategy strategy = ShardingStrategy::kFullShard,
    bool in_units = true) {
  ShardOptions options;
  options.strategy = strategy;
  if (in_units) options.wrap_policy = module_type<GoldenPart>();
  return fully_shard(std::make_shared<GoldenModel>(), groups, options).value();
}

// Every parameter, on every rank. Collective.
inline std::map<std::string, at::Tensor> parameters_of(
    const ShardedModule& sharded) {
  std::map<std::string, at::Tensor> all;
  EXPECT_TRUE(sharded
                  .full_state_dict(
                      [&](const std::string& name, const at::Tensor& tensor) {
                        all[name] = tensor.clone();
                        return absl::OkStatus();
                      },
                      /*all_ranks=*/true)
                  .ok());
  return all;
}

}  // namespace testing
}  // namespace fullshard

#endif  // FULLSHARD_TESTS_OPTIM_GOLDEN_MODEL_H_
