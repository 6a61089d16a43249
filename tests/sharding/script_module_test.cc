// A model exported from Python trains sharded here with the losses that Python
// has. Needs the Python that bazelw sets up.

#include "fullshard/sharding/script_module.h"

#include <fstream>

#include "ATen/ATen.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/tests/io/python.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

constexpr int kSteps = 5;

// Saves the model, then trains it on the batches of two ranks and prints the
// losses of each step.
constexpr char kScript[] = R"(
import sys, torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, 4, batch_first=True)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)
    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(3)])
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0]))
    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)

torch.manual_seed(0)
torch.set_num_threads(1)
model = Model()
torch.jit.script(model).save(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0,
                              eps=1e-3)
with open(sys.argv[2], "w") as out:
    for step in range(5):
        total = 0
        for rank in range(2):
            tokens = (torch.arange(24).view(4, 6) * (3 + rank) + step) % 17
            loss = F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 17),
                                   tokens[:, 1:].reshape(-1))
            (loss / 2).backward()
            print(f"{loss.item():.9g}", file=out)
        optimizer.step()
        optimizer.zero_grad()
)";

std::vector<double> python_losses(const std::string& model,
                                  const std::string& losses) {
  TempDir dir;
  EXPECT_EQ(run_python(dir.write("export.py", kScript), model + " " + losses),
            0);
  std::ifstream in(losses);
  std::vector<double> values;
  for (double value; in >> value;) values.push_back(value);
  EXPECT_EQ(values.size(), 2u * kSteps);
  return values;
}

TEST(ScriptModuleTest, TrainsWithTheLossesOfPython) {
  if (!have_python()) return;
  TempDir dir;
  const std::string path = dir.file("model.ts");
  const std::vector<double> expected = python_losses(path, dir.file("losses"));
  for (bool bf16 : {false, true}) {
    testing::run_ranks(2, [&](ProcessGroups& groups) {
      ShardOptions options;
      options.wrap_policy = script_type("Block");
      if (bf16) {
        options.mixed_precision.param_dtype = at::kBFloat16;
        options.mixed_precision.buffer_dtype = at::kBFloat16;
        options.mixed_precision.reduce_dtype = at::kFloat;
      }
      auto sharded =
          fully_shard(ScriptModule::load(path).value(), groups, options)
              .value();
      EXPECT_EQ(sharded.units().size(), 4u);
      AdamWOptions adamw;
      adamw.lr = 1e-2, adamw.weight_decay = 0, adamw.eps = 1e-3;
      ShardedAdamW optimizer(sharded, adamw);
      for (int step = 0; step < kSteps; ++step) {
        const at::Tensor tokens =
            (at::arange(24).view({4, 6}) * (3 + groups.rank()) + step)
                .remainder(17);
        const at::Tensor loss = at::cross_entropy_loss(
            sharded(tokens).narrow(1, 0, 5).reshape({-1, 17}).to(at::kFloat),
            tokens.narrow(1, 1, 5).reshape({-1}));
        const size_t index = static_cast<size_t>(2 * step + groups.rank());
        EXPECT_NEAR(loss.item<double>(), expected[index], bf16 ? 0.05 : 1e-5)
            << "step " << step;
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      // The tied weight is one parameter with two names.
      std::map<std::string, at::Tensor> state;
      EXPECT_TRUE(sharded
                      .full_state_dict(
                          [&](const std::string& name, const at::Tensor& t) {
                            state[name] = t.clone();
                            return absl::OkStatus();
                          },
                          /*all_ranks=*/true)
                      .ok());
      EXPECT_TRUE(state.at("embed.weight").equal(state.at("head.weight")));
      EXPECT_EQ(state.at("blocks.1.up.weight").size(0), 64);
    });
  }
}

TEST(ScriptModuleTest, NotAScriptModuleIsOneLine) {
  TempDir dir;
  const std::string path = dir.file("model.ts");
  std::ofstream(path) << "no archive";
  const std::string message(ScriptModule::load(path).status().message());
  EXPECT_THAT(message, ::testing::HasSubstr("expected a TorchScript module"));
  EXPECT_EQ(message.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace fullshard
