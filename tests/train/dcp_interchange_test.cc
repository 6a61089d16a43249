// torch.distributed.checkpoint of Python reads what TrainingCheckpoints writes:
// whole, by key, and into shards of another layout.

#include <cstdio>

#include "ATen/ATen.h"
#include "fullshard/io/full_state_dict.h"
#include "fullshard/io/pt_writer.h"
#include "fullshard/optim/optimizer_state.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/tests/io/python.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "fullshard/training_checkpoints.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {
namespace {

struct Model : torch::nn::Module {
  Model() {
    at::manual_seed(3);
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(7, 7)));
    }
    turned =
        register_parameter("turned", at::randn({3, 5, 7}).permute({2, 0, 1}));
    wave = register_parameter("wave", at::randn({7}, at::kComplexFloat));
    scale = register_parameter("scale", at::randn({}));
    half = register_parameter("half", at::randn({5}).to(at::kBFloat16), false);
    tied = register_module("tied", std::make_shared<Tied>(layers[1]->weight));
    seen = register_buffer("seen", at::full({1}, 7, at::kLong));
  }
  struct Tied : torch::nn::Module {
    explicit Tied(at::Tensor shared) {
      register_parameter("weight", std::move(shared));
    }
  };
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = at::tanh(layer(x));
    x = x * scale + at::real(wave) * at::imag(wave);
    return (x * turned.sum({1, 2})).pow(2).mean();
  }
  std::vector<torch::nn::Linear> layers;
  std::shared_ptr<Tied> tied;
  at::Tensor turned, wave, scale, half, seen;
};

// argv: checkpoint, expected .pt file.
constexpr char kScript[] = R"(
import pickle, sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

folder, expected_path, out = sys.argv[1:4]
# dcp.load hides why it cannot read this.
pickle.load(open(folder + "/.metadata", "rb"))
expected = torch.load(expected_path, weights_only=True)

def same(a, b, where):
    assert a.dtype == b.dtype and a.shape == b.shape, (where, a, b)
    assert torch.equal(a, b), where

# By key, into tensors of the caller's.
mine = {"model": {k: torch.zeros_like(v) for k, v in expected["model"].items()},
        "optim": {"state": {n: {k: torch.zeros_like(v) for k, v in s.items()}
                            for n, s in expected["optim"].items()}}}
dcp.load(mine, checkpoint_id=folder)
for k, v in expected["model"].items():
    same(mine["model"][k], v, k)
for n, s in expected["optim"].items():
    for k, v in s.items():
        same(mine["optim"]["state"][n][k], v, n + "/" + k)

# As a whole, without knowing what is inside.
dcp_to_torch_save(folder, out)
whole = torch.load(out, weights_only=True)
assert set(whole) == {"model", "optim", "rng"}, whole.keys()
assert set(whole["model"]) == set(expected["model"]), whole["model"].keys()
for k, v in expected["model"].items():
    same(whole["model"][k], v, k)
assert set(whole["optim"]["state"]) == set(expected["optim"])
print("python agrees on", len(expected["model"]), "tensors")
)";

TEST(DcpInterchangeTest, PythonReadsWhatAnyNumberOfRanksSaved) {
  if (!have_python()) return;
  for (int ranks : {1, 2, 3, 4}) {
    TempDir dir;
    testing::run_ranks(ranks, [&](ProcessGroups& groups) {
      ShardOptions options;
      options.wrap_policy = module_type<torch::nn::LinearImpl>();
      auto model =
          fully_shard(std::make_shared<Model>(), groups, options).value();
      AdamWOptions settings;
      settings.lr = 0.1;
      ShardedAdamW optimizer(model, settings);
      for (int step = 0; step < 3; ++step) {
        model(at::ones({2, 7}) * (step + groups.rank())).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      TrainingCheckpoints checkpoints(dir.file("run"), model, &optimizer);
      ASSERT_TRUE(checkpoints.save_async(3, {}).ok());
      ASSERT_TRUE(checkpoints.wait().ok());
      std::unique_ptr<PtWriter> writer;
      if (groups.rank() == 0) {
        writer = PtWriter::create(dir.file("expected.pt")).value();
        ASSERT_TRUE(writer->begin_dict("model").ok());
      }
      ASSERT_TRUE(model
                      .full_state_dict([&](const std::string& name,
                                           const at::Tensor& tensor) {
                        return writer->tensor(name, tensor.clone());
                      })
                      .ok());
      const auto state = full_optimizer_state(optimizer).value();
      if (groups.rank() != 0) return;
      ASSERT_TRUE(writer->end_dict().ok());
      ASSERT_TRUE(writer->begin_dict("optim").ok());
      for (const auto& [name, entry] : state.state) {
        ASSERT_TRUE(writer->begin_dict(name).ok());
        for (const auto& [key, tensor] : entry) {
          ASSERT_TRUE(writer->tensor(key, tensor.clone()).ok());
        }
        ASSERT_TRUE(writer->end_dict().ok());
      }
      ASSERT_TRUE(writer->end_dict().ok());
      ASSERT_TRUE(writer->commit().ok());
    });
    const std::string script = dir.write("check.py", kScript);
    EXPECT_EQ(run_python(script, dir.file("run/latest") + " " +
                                     dir.file("expected.pt") + " " +
                                     dir.file("whole.pt")),
              0);
  }
}

}  // namespace
}  // namespace fullshard
