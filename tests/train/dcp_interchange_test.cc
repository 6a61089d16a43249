// torch.distributed.checkpoint of Python reads what TrainingCheckpoints writes:
// whole, by key, and into shards of another layout.

#include <cstdio>
#include <filesystem>

#include "ATen/ATen.h"
#include "fullshard/io/checkpoint_reader.h"
#include "fullshard/io/pt_reader.h"
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
    coarse =
        register_parameter("coarse", at::randn({5}).to(at::kBFloat16), false);
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
  at::Tensor turned, wave, scale, coarse, seen;
};

// argv: checkpoint, expected .pt file.
constexpr char kScript[] = R"(
import pickle, sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict,
    set_optimizer_state_dict)
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

# Into a model and an optimizer of Python's, as its own checkpoints.
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(3):
            self.add_module(f"layer{i}", torch.nn.Linear(7, 7))
        for name in ["turned", "wave", "scale", "coarse"]:
            self.register_parameter(name, torch.nn.Parameter(
                torch.zeros_like(expected["model"][name]),
                requires_grad=name != "coarse"))
        self.tied = torch.nn.Module()
        self.tied.weight = self.layer1.weight
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

model = Model()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW([
    {"params": [p for p in trained if p.dim() > 1]},
    {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}])
target = {"model": get_model_state_dict(model),
          "optim": get_optimizer_state_dict(model, optimizer)}
dcp.load(target, checkpoint_id=folder)
set_model_state_dict(model, target["model"])
set_optimizer_state_dict(model, optimizer, target["optim"])
for k, v in expected["model"].items():
    same(model.state_dict()[k], v, k)
for name, p in model.named_parameters():
    if name in expected["optim"]:
        for k, v in expected["optim"][name].items():
            same(optimizer.state[p][k], v, name + "/" + k)
assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.1]
assert [g["weight_decay"] for g in optimizer.param_groups] == [0.01, 0.0]
assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)

# As a whole, without knowing what is inside.
dcp_to_torch_save(folder, out)
whole = torch.load(out, weights_only=True)
assert set(whole) == {"model", "optim", "rng"}, whole.keys()
assert set(whole["model"]) == set(expected["model"]), whole["model"].keys()
for k, v in expected["model"].items():
    same(whole["model"][k], v, k)
assert set(whole["optim"]["state"]) == set(expected["optim"])
assert whole["optim"]["param_groups"][1]["weight_decay"] == 0
assert "layer0.weight" in whole["optim"]["param_groups"][0]["params"]
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

// argv: folder. Two processes train a model under FSDP2 and save it; rank 0
// also saves it whole. Then tensors cut in other ways.
constexpr char kSaveScript[] = R"(
import os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer0 = torch.nn.Linear(7, 7)
        self.layer1 = torch.nn.Linear(7, 5)
        self.register_buffer("seen", torch.tensor([7]))

    def forward(self, x):
        return self.layer1(torch.tanh(self.layer0(x))).pow(2).mean()

def run(rank, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method="file://" + folder + "/store",
                            rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    model = Model()
    fully_shard(model.layer0, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 7) * (step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"model": get_model_state_dict(model),
              "optimizer": get_optimizer_state_dict(model, optimizer),
              "step": 3}, checkpoint_id=folder + "/dcp")
    full = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(model, options=full)
    state = get_optimizer_state_dict(model, optimizer, options=full)["state"]
    cut = torch.arange(60.0).view(5, 4, 3)
    last = torch.arange(96.0).view(2, 4, 3, 4).contiguous(
        memory_format=torch.channels_last)
    plain = {"rows": cut, "columns": cut + 1, "inner": cut.to(torch.bfloat16),
             "last": last, "scalar": torch.tensor(2, dtype=torch.int64),
             "empty": torch.zeros(0, 3), "flag": torch.tensor([True, False])}
    dcp.save({"rows": distribute_tensor(plain["rows"], mesh, [Shard(0)]),
              "columns": distribute_tensor(plain["columns"], mesh, [Shard(1)]),
              "inner": distribute_tensor(plain["inner"], mesh, [Shard(2)]),
              **{k: plain[k] for k in ["last", "scalar", "empty", "flag"]},
              "note": "no tensor"}, checkpoint_id=folder + "/cut")
    if rank == 0:
        torch.save({"model": whole, "optim": state, "plain": plain},
                   folder + "/expected.pt")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), 2)
)";

struct PythonsModel : torch::nn::Module {
  PythonsModel() {
    register_module("layer0", torch::nn::Linear(7, 7));
    register_module("layer1", torch::nn::Linear(7, 5));
    register_buffer("seen", at::zeros({1}, at::kLong));
  }
};

// The tensor at "optim.layer0.weight.step" of a .pt file.
at::Tensor expected(PtReader& file, const std::vector<std::string>& path) {
  PtValue value = file.root();
  for (const std::string& key : path) value = value.find(key).value();
  return file.tensor(value).value();
}

TEST(DcpInterchangeTest, WeReadWhatPythonSaved) {
  if (!have_python()) return;
  TempDir dir;
  const std::string script = dir.write("save.py", kSaveScript);
  const std::string folder = dir.file("python");
  std::filesystem::create_directory(folder);
  ASSERT_EQ(run_python(script, folder), 0);
  for (int ranks : {1, 2, 3}) {
    testing::run_ranks(ranks, [&](ProcessGroups& groups) {
      auto file = PtReader::open(folder + "/expected.pt").value();
      ShardOptions options;
      options.wrap_policy = module_type<torch::nn::LinearImpl>();
      auto model =
          fully_shard(std::make_shared<PythonsModel>(), groups, options)
              .value();
      ShardedAdamW optimizer(model);
      TrainingCheckpointsOptions names;
      names.optimizer_key = "optimizer";
      TrainingCheckpoints checkpoints(dir.file("run"), model, &optimizer,
                                      names);
      const auto loaded = checkpoints.load(folder + "/dcp");
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      ASSERT_TRUE(
          model
              .full_state_dict(
                  [&](const std::string& name, const at::Tensor& t) {
                    EXPECT_TRUE(t.equal(expected(*file, {"model", name})))
                        << name;
                    return absl::OkStatus();
                  },
                  /*all_ranks=*/true)
              .ok());
      for (const LocalOptimizerState& local : optimizer.local_state()) {
        EXPECT_EQ(local.step, 3);
        for (const auto& [key, tensor] : local.tensors) {
          EXPECT_TRUE(
              tensor.equal(expected(*file, {"optim", local.name, key})
                               .reshape({-1})
                               .narrow(0, local.parameter_offset, local.numel)))
              << local.name << key;
        }
      }
      const auto cut = open_checkpoint(folder + "/cut");
      ASSERT_TRUE(cut.ok()) << cut.status();
      EXPECT_EQ((*cut)->format(), "dcp");
      EXPECT_EQ((*cut)->tensors().size(), 7u);
      for (size_t i = 0; i < (*cut)->tensors().size(); ++i) {
        const std::string& name = (*cut)->tensors()[i].name;
        EXPECT_TRUE(
            (*cut)->tensor(i).value().equal(expected(*file, {"plain", name})))
            << name;
      }
    });
  }
}

}  // namespace
}  // namespace fullshard
