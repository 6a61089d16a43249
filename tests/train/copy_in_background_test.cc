// save_async() with copy_in_background: whatever changes the state waits for
// the copy, and what goes around that is found.

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/optim/ema.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "fullshard/tests/train/odd_model.h"
#include "fullshard/training_checkpoints.h"
#include "gmock/gmock.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {
namespace {

using ::testing::HasSubstr;
using testing::layer_units;
using testing::run_ranks;
using testing::State;
using testing::state_of;

// Large enough that its copy takes longer than the start of what follows.
struct Layers : torch::nn::Module {
  Layers() {
    at::manual_seed(3);
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(1500, 1500)));
    }
    seen = register_buffer("seen", at::zeros({1}, at::kLong));
  }
  at::Tensor forward(at::Tensor x) {
    seen.add_(1);
    for (auto& layer : layers) x = at::tanh(layer(x));
    return x.mean();
  }
  std::vector<torch::nn::Linear> layers;
  at::Tensor seen;
};

class Job {
 public:
  Job(ProcessGroups& groups, const std::string& folder)
      : model(fully_shard(std::make_shared<Layers>(), groups, layer_units())
                  .value()),
        optimizer(model, AdamWOptions()),
        checkpoints(folder, model, &optimizer, in_background()) {}

  void backward() { model(at::ones({1, 1500})).backward(); }

  // What `change` does right after a save was started is not in it.
  void expect_old_values(const char* what,
                         const std::function<void()>& change) {
    SCOPED_TRACE(what);
    const State parameters = state_of(model);
    std::vector<LocalOptimizerState> states = optimizer.local_state();
    for (LocalOptimizerState& state : states) {
      state.tensors[0].second = state.tensors[0].second.clone();
    }
    const auto saved = checkpoints.save_async(++step_, {});
    ASSERT_TRUE(saved.ok()) << saved.status();
    change();
    const absl::Status status = checkpoints.wait();
    ASSERT_TRUE(status.ok()) << status;
    const auto reader = ShardedCheckpointReader::open(*saved).value();
    for (const auto& [name, tensor] : parameters) {
      const auto found = reader->tensor(*reader->find("model." + name));
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_TRUE(found->equal(tensor)) << name;
    }
    for (const LocalOptimizerState& state : states) {
      const auto* const saved_state =
          reader->find("optim.state." + state.name + ".exp_avg");
      if (saved_state == nullptr) continue;  // Before the first step.
      const at::Tensor whole = reader->tensor(*saved_state).value();
      EXPECT_TRUE(whole.view({-1})
                      .narrow(0, state.parameter_offset, state.numel)
                      .equal(state.tensors[0].second))
          << state.name;
    }
  }

  FullyShardedModule<Layers> model;
  ShardedAdamW optimizer;
  TrainingCheckpoints checkpoints;

 private:
  static TrainingCheckpointsOptions in_background() {
    TrainingCheckpointsOptions options;
    options.copy_in_background = true;
    options.keep_last = 1;
    return options;
  }
  int64_t step_ = 0;
};

TEST(CopyInBackgroundTest, WhatChangesTheStateWaits) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    Job job(groups, dir.file("run"));
    job.backward();
    for (int i = 0; i < 3; ++i) {
      job.expect_old_values("step", [&] { job.optimizer.step(); });
    }
    job.expect_old_values("forward", [&] {
      at::NoGradGuard no_grad;
      job.model(at::ones({1, 1500}));
    });
    job.optimizer.zero_grad();
    job.optimizer.set_step_in_backward(true);
    job.expect_old_values("step in backward", [&] { job.backward(); });
    job.optimizer.set_step_in_backward(false);
    job.optimizer.zero_grad();
    job.expect_old_values("load", [&] {
      EXPECT_TRUE(
          job.model
              .load_full_state_dict(
                  [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
                    if (name == "seen") {
                      return at::zeros({1}, at::kLong);
                    }
                    return absl::StrContains(name, "bias")
                               ? at::ones({1500})
                               : at::ones({1500, 1500});
                  })
              .ok());
    });
    job.expect_old_values("optimizer state", [&] {
      std::vector<LocalOptimizerState> states = job.optimizer.local_state();
      for (LocalOptimizerState& state : states) {
        for (auto& [key, tensor] : state.tensors) {
          tensor = at::full_like(tensor, 7);
        }
      }
      EXPECT_TRUE(job.optimizer.load_local_state(states).ok());
    });
    job.expect_old_values("edit of full parameters", [&] {
      EXPECT_TRUE(job.model
                      .summon_full_params({},
                                          [](std::vector<FullParameter>& all) {
                                            for (FullParameter& p : all) {
                                              p.value.fill_(5);
                                            }
                                            return absl::OkStatus();
                                          })
                      .ok());
    });
    ShardedEma ema(job.model, 10);
    job.expect_old_values("average swapped in", [&] {
      ema.swap_in();
      ema.swap_out();
    });
    job.expect_old_values("local parameters", [&] {
      job.model.reshard();
      at::NoGradGuard no_grad;
      for (at::Tensor& p : job.model.parameters()) p.add_(100);
    });
    job.expect_old_values("wait_for_copy", [&] {
      job.checkpoints.wait_for_copy();
      at::NoGradGuard no_grad;
      for (at::Tensor& p : job.model.parameters()) p.add_(100);
    });
    job.expect_old_values("set_trainable", [&] {
      EXPECT_TRUE(job.model
                      .set_trainable(
                          [](const std::string& name) {
                            return name == "layer1.weight";
                          },
                          false)
                      .ok());
    });
  });
}

// A change that did not wait came too late to matter, or is found, and fails
// the save on every rank; but for one that falls between the copy of the last
// tensor and the end of its own operator, which this test never is.
TEST(CopyInBackgroundTest, AChangeThatDoesNotWaitIsFound) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    auto model =
        fully_shard(std::make_shared<Layers>(), groups, layer_units()).value();
    TrainingCheckpointsOptions options;
    options.copy_in_background = true;
    TrainingCheckpoints checkpoints(dir.file("run"), model, nullptr, options);
    at::Tensor last = model.parameters().back();
    int num_found = 0;
    for (int step = 1; step <= 20; ++step) {
      const State before = state_of(model);
      const auto saved = checkpoints.save_async(step, {});
      ASSERT_TRUE(saved.ok()) << saved.status();
      if (groups.rank() == 1) {
        at::NoGradGuard no_grad;
        last.narrow(0, 0, 1).add_(1);
      }
      const absl::Status status = checkpoints.wait();
      if (!status.ok()) {
        ++num_found;
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr("' was changed while save_async() copied it"));
        EXPECT_FALSE(std::filesystem::exists(*saved));
        continue;
      }
      const auto reader = ShardedCheckpointReader::open(*saved).value();
      for (const auto& [name, tensor] : before) {
        EXPECT_TRUE(reader->tensor(*reader->find("model." + name))
                        .value()
                        .equal(tensor))
            << name;
      }
    }
    EXPECT_GT(num_found, 0);
    EXPECT_TRUE(checkpoints.save(21, {}).ok());
  });
}

// A save that is under way needs nothing but what it holds.
TEST(CopyInBackgroundTest, TheModelMayGoFirst) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    TrainingCheckpointsOptions options;
    options.copy_in_background = true;
    auto model = std::make_unique<FullyShardedModule<Layers>>(
        fully_shard(std::make_shared<Layers>(), groups, layer_units()).value());
    const State before = state_of(*model);
    TrainingCheckpoints checkpoints(dir.file("run"), *model, nullptr, options);
    const auto saved = checkpoints.save_async(1, {});
    ASSERT_TRUE(saved.ok()) << saved.status();
    model.reset();
    ASSERT_TRUE(checkpoints.wait().ok());
    const auto reader = ShardedCheckpointReader::open(*saved).value();
    for (const auto& [name, tensor] : before) {
      EXPECT_TRUE(
          reader->tensor(*reader->find("model." + name)).value().equal(tensor))
          << name;
    }
  });
}

// The thread and its buffer outlive neither the next save nor the object.
TEST(CopyInBackgroundTest, SavesRightAfterEachOther) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    auto model =
        fully_shard(std::make_shared<Layers>(), groups, layer_units()).value();
    const State before = state_of(model);
    TrainingCheckpointsOptions options;
    options.copy_in_background = true;
    const std::string folder = dir.file("run");
    for (int round = 0; round < 3; ++round) {
      TrainingCheckpoints checkpoints(folder, model, nullptr, options);
      for (int step = 1; step <= 3; ++step) {
        ASSERT_TRUE(checkpoints.save_async(3 * round + step, {}).ok());
      }
    }  // While the last one is copied.
    // The first to ask for the local parameters moves them.
    TrainingCheckpoints checkpoints(folder, model, nullptr, options);
    ASSERT_TRUE(checkpoints.save_async(10, {}).ok());
    {
      at::NoGradGuard no_grad;
      for (LocalParameter& p : model.named_local_parameters()) {
        p.tensor.fill_(3);
      }
    }
    ASSERT_TRUE(checkpoints.wait().ok());
    for (int step = 1; step <= 10; ++step) {
      const auto reader =
          ShardedCheckpointReader::open(folder + "/" + step_folder_name(step))
              .value();
      for (const auto& [name, tensor] : before) {
        EXPECT_TRUE(reader->tensor(*reader->find("model." + name))
                        .value()
                        .equal(tensor))
            << name;
      }
    }
  });
}

}  // namespace
}  // namespace fullshard
