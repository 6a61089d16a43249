// A sharded transformer trains like the unsharded one: losses, gradients, norm
// and all parameters, at every step, for every combination of the options.

#include <algorithm>
#include <map>
#include <string>

#include "ATen/ATen.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "fullshard/tests/testing/tiny_models.h"
#include "fullshard/tests/testing/unsharded_reference.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using testing::TinyBlockImpl;
using testing::TinyTransformerImpl;
using testing::UnshardedReference;

constexpr int64_t kVocab = 13;
constexpr int kSteps = 4;

struct Case {
  std::string backend;
  int num_ranks;
  ShardingStrategy strategy;
  bool checkpointing;
  bool bf16;
};

std::string strategy_name(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::kFullShard:
      return "FullShard";
    case ShardingStrategy::kShardGradOp:
      return "ShardGradOp";
    case ShardingStrategy::kHybridShard:
      return "Hybrid";
    case ShardingStrategy::kHybridShardZero2:
      return "HybridZero2";
    case ShardingStrategy::kNoShard:
      return "NoShard";
  }
  return "";
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return c.backend + std::to_string(c.num_ranks) + strategy_name(c.strategy) +
         (c.checkpointing ? "Checkpointed" : "") + (c.bf16 ? "Bf16" : "Fp32");
}

std::shared_ptr<TinyTransformerImpl> make_model() {
  at::manual_seed(3);
  return std::make_shared<TinyTransformerImpl>(/*num_blocks=*/3, /*d=*/6,
                                               kVocab);
}

at::Tensor tokens_of(int step, int rank) {
  at::Generator generator = at::detail::createCPUGenerator(
      static_cast<uint64_t>(1000 + 16 * step + rank));
  return at::randint(0, kVocab, {2, 5}, generator, at::kLong);
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& tokens) {
  return at::cross_entropy_loss(
      logits.narrow(1, 0, 4).reshape({-1, kVocab}).to(at::kFloat),
      tokens.narrow(1, 1, 4).reshape({-1}));
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected,
                  bool bf16, const std::string& what) {
  const double rtol = bf16 ? 2e-2 : 1e-5, atol = bf16 ? 2e-4 : 1e-6;
  EXPECT_TRUE(at::allclose(actual, expected, rtol, atol))
      << what << ": largest difference "
      << (actual - expected).abs().max().item<double>();
}

// The gradients of all ranks, put together, are the reference's.
void compare_gradients(ShardedModule& sharded,
                       const UnshardedReference& reference, const Case& c) {
  ProcessGroups groups = sharded.groups();
  double local_squares = 0, squares = 0;
  for (const LocalParameter& local : sharded.named_local_parameters()) {
    ASSERT_TRUE(local.tensor.grad().defined()) << local.name;
    local_squares += local.tensor.grad().pow(2).sum().item<double>();
    // What a rank owns is a run of consecutive elements.
    const auto found = std::find(reference.names().begin(),
                                 reference.names().end(), local.name);
    ASSERT_NE(found, reference.names().end()) << local.name;
    const at::Tensor expected =
        reference.masters()[found - reference.names().begin()].grad().reshape(
            -1);
    const int64_t length = local.tensor.numel();
    double best = 1e9;
    for (int64_t begin = 0; begin + length <= expected.numel(); ++begin) {
      best = std::min(best,
                      (expected.narrow(0, begin, length) - local.tensor.grad())
                          .abs()
                          .max()
                          .item<double>());
    }
    EXPECT_LT(best, c.bf16 ? 2e-3 : 1e-6) << local.name;
  }
  for (const at::Tensor& master : reference.masters()) {
    squares += master.grad().pow(2).sum().item<double>();
  }
  at::Tensor sum = at::full({1}, local_squares, at::kDouble);
  if (c.strategy != ShardingStrategy::kNoShard && c.num_ranks > 1) {
    std::vector<at::Tensor> tensors = {sum};
    groups.world()->allreduce(tensors)->wait();
  }
  EXPECT_NEAR(sum.item<double>(), squares, squares * (c.bf16 ? 4e-2 : 1e-4));
}

void train_and_compare(ProcessGroups& groups, const Case& c) {
  auto reference_model = make_model();
  UnshardedReference reference(
      reference_model, /*lr=*/1e-2, /*weight_decay=*/0.1,
      c.bf16 ? std::optional<at::ScalarType>(at::kBFloat16) : std::nullopt);
  auto model = make_model();
  if (c.checkpointing) {
    ASSERT_EQ(apply_activation_checkpointing(
                  *model,
                  [](const std::string&, torch::nn::Module& m) {
                    return dynamic_cast<TinyBlockImpl*>(&m) != nullptr;
                  })
                  .value(),
              3);
  }
  ShardOptions options;
  options.strategy = c.strategy;
  options.wrap_policy = module_type<TinyBlockImpl>();
  if (c.bf16) {
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.reduce_dtype = at::kFloat;
  }
  auto sharded = fully_shard(model, groups, options);
  ASSERT_TRUE(sharded.ok()) << sharded.status();
  AdamWOptions adamw;
  adamw.lr = 1e-2;
  adamw.weight_decay = 0.1;
  adamw.eps = UnshardedReference::kEps;
  ShardedAdamW optimizer(*sharded, adamw);

  for (int step = 0; step < kSteps; ++step) {
    const std::vector<double> losses = reference.forward_backward(
        c.num_ranks, [&](torch::nn::Module& m, int rank) {
          const at::Tensor tokens = tokens_of(step, rank);
          return loss_of(static_cast<TinyTransformerImpl&>(m).forward(tokens),
                         tokens);
        });
    const at::Tensor tokens = tokens_of(step, groups.rank());
    const at::Tensor loss = loss_of((*sharded)(tokens), tokens);
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), losses[groups.rank()],
                c.bf16 ? 2e-2 : 1e-5)
        << "step " << step;

    // Tight where it matters: clipping at half the norm in every step.
    const double norm = reference.clip(0.5);
    EXPECT_NEAR(sharded->clip_grad_norm(0.5), norm,
                norm * (c.bf16 ? 2e-2 : 1e-5));
    // Reading gradients applies the folded scale; not every time, so that the
    // optimizer's own path is covered too.
    if (step % 2 == 1) compare_gradients(*sharded, reference, c);
    optimizer.step();
    optimizer.zero_grad();
    reference.step();

    std::map<std::string, at::Tensor> state;
    ASSERT_TRUE(sharded
                    ->full_state_dict(
                        [&](const std::string& name, const at::Tensor& t) {
                          state[name] = t.clone();
                          return absl::OkStatus();
                        },
                        /*all_ranks=*/true)
                    .ok());
    ASSERT_EQ(state.size(), reference.names().size());
    for (size_t i = 0; i < reference.names().size(); ++i) {
      const std::string& name = reference.names()[i];
      ASSERT_EQ(state.count(name), 1u) << name;
      expect_close(state[name], reference.masters()[i], c.bf16,
                   name + " after step " + std::to_string(step));
    }
  }
}

class ParityTest : public ::testing::TestWithParam<Case> {};

TEST_P(ParityTest, TrainsLikeTheUnshardedModel) {
  const Case& c = GetParam();
  testing::RunRanksOptions options;
  options.backend = c.backend;
  testing::run_ranks(
      c.num_ranks, [&](ProcessGroups& groups) { train_and_compare(groups, c); },
      options);
}

std::vector<Case> cases(const std::string& backend,
                        const std::vector<int>& world_sizes) {
  std::vector<Case> all;
  for (int num_ranks : world_sizes) {
    for (auto strategy :
         {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
          ShardingStrategy::kNoShard}) {
      for (bool checkpointing : {false, true}) {
        for (bool bf16 : {false, true}) {
          all.push_back({backend, num_ranks, strategy, checkpointing, bf16});
        }
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(SharedMemory, ParityTest,
                         ::testing::ValuesIn(cases("shm", {1, 2, 3, 4})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(
    Gloo, ParityTest,
    ::testing::Values(
        Case{"gloo", 2, ShardingStrategy::kFullShard, false, false},
        Case{"gloo", 2, ShardingStrategy::kFullShard, true, true},
        Case{"gloo", 3, ShardingStrategy::kShardGradOp, true, false},
        Case{"gloo", 2, ShardingStrategy::kNoShard, false, false},
        Case{"gloo", 2, ShardingStrategy::kHybridShard, false, false}),
    case_name);

}  // namespace
}  // namespace fullshard
