#include "fullshard/training_checkpoints.h"

#include <unistd.h>

#include <filesystem>
#include <map>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/optim/sharded_adagrad.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/optim/sharded_sgd.h"
#include "fullshard/tests/io/fault_file_system.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "fullshard/tests/train/odd_model.h"
#include "gmock/gmock.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {
namespace {

using ::testing::ElementsAre;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::layer_units;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::State;
using testing::state_of;
using Model = testing::OddModel;

double train(FullyShardedModule<Model>& model, ShardedOptimizer& optimizer,
             int step, int rank) {
  const at::Tensor x =
      at::arange(14, at::kFloat).view({2, 7}).sin() * (1 + rank + step);
  const at::Tensor loss = model(x);
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
  return loss.item<double>();
}

AdamWOptions adamw() {
  AdamWOptions options;
  options.lr = 0.05;
  return options;
}

// Three steps, a checkpoint, two more: then the same two from the checkpoint,
// with an optimizer and a generator that know nothing of the first three.
template <class Optimizer, class Options>
void expect_exact_resume(ProcessGroups& groups, const std::string& folder,
                         const Options& settings) {
  auto model =
      fully_shard(std::make_shared<Model>(), groups, layer_units()).value();
  Optimizer optimizer(model, settings);
  at::manual_seed(50 + groups.rank());
  for (int step = 0; step < 3; ++step) {
    train(model, optimizer, step, groups.rank());
  }
  TrainingCheckpoints checkpoints(folder, model, &optimizer);
  const auto saved = checkpoints.save(3, {{"epoch", "1"}});
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(*saved, folder + "/step-000003");
  const double first = train(model, optimizer, 3, groups.rank());
  const double second = train(model, optimizer, 4, groups.rank());

  auto again =
      fully_shard(std::make_shared<Model>(), groups, layer_units()).value();
  Optimizer fresh(again, settings);
  train(again, fresh, 9, groups.rank());  // What is loaded replaces it all.
  at::manual_seed(1);
  TrainingCheckpoints from(folder, again, &fresh);
  const auto state = from.load(folder + "/latest");
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_THAT(*state, ElementsAre(std::make_pair("epoch", "1"),
                                  std::make_pair("step", "3")));
  EXPECT_EQ(train(again, fresh, 3, groups.rank()), first);
  EXPECT_EQ(train(again, fresh, 4, groups.rank()), second);
  expect_equal(state_of(again), state_of(model));
}

TEST(TrainingCheckpointsTest, ResumesWithTheSameBits) {
  for (int ranks : {1, 2, 3}) {
    for (const char* backend : {"shm", "gloo"}) {
      TempDir dir;
      RunRanksOptions run;
      run.backend = backend;
      run_ranks(
          ranks,
          [&](ProcessGroups& groups) {
            AdamWOptions amsgrad = adamw();
            amsgrad.amsgrad = true;
            SgdOptions plain, momentum;
            plain.lr = momentum.lr = 0.05;
            momentum.momentum = 0.9;
            AdagradOptions adagrad;
            adagrad.lr = 0.05;
            expect_exact_resume<ShardedAdamW>(groups, dir.file("adamw"),
                                              adamw());
            expect_exact_resume<ShardedAdamW>(groups, dir.file("amsgrad"),
                                              amsgrad);
            expect_exact_resume<ShardedSGD>(groups, dir.file("sgd"), plain);
            expect_exact_resume<ShardedSGD>(groups, dir.file("momentum"),
                                            momentum);
            expect_exact_resume<ShardedAdagrad>(groups, dir.file("adagrad"),
                                                adagrad);
          },
          run);
    }
  }
}

// How a job is laid out.
struct Layout {
  int ranks = 1;
  int shard_group_size = 0;
  bool units = true;
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
};

// Any layout reads what any other wrote.
TEST(TrainingCheckpointsTest, LoadsInEveryLayout) {
  const std::vector<Layout> layouts = {
      {1},
      {2},
      {3, 0, false},
      {4, 2, true, ShardingStrategy::kHybridShard},
      {2, 0, true, ShardingStrategy::kNoShard},
      {4, 0, false, ShardingStrategy::kShardGradOp},
      {8}};
  TempDir dir;
  const auto with = [&](const Layout& layout, auto body) {
    RunRanksOptions run;
    run.shard_group_size = layout.shard_group_size;
    run_ranks(
        layout.ranks,
        [&](ProcessGroups& groups) {
          ShardOptions options = layout.units ? layer_units() : ShardOptions();
          options.strategy = layout.strategy;
          auto model =
              fully_shard(std::make_shared<Model>(), groups, options).value();
          ShardedAdamW optimizer(model, adamw());
          TrainingCheckpoints checkpoints(dir.file("run"), model, &optimizer);
          body(groups, model, optimizer, checkpoints);
        },
        run);
  };
  for (size_t i = 0; i < layouts.size(); ++i) {
    with(layouts[i], [&](ProcessGroups& groups, auto& model, auto& optimizer,
                         auto& checkpoints) {
      at::manual_seed(1);
      for (int step = 0; step < 2; ++step) {
        train(model, optimizer, step, groups.rank());
      }
      const auto saved = checkpoints.save(static_cast<int64_t>(i), {});
      ASSERT_TRUE(saved.ok()) << saved.status();
      if (groups.rank() != 0) return;
      const auto reader = ShardedCheckpointReader::open(*saved).value();
      EXPECT_TRUE(reader->verify().ok());
      // The optimizer's state is there once, the tied weight too.
      EXPECT_NE(reader->find("optim.state.layer0.weight.exp_avg"), nullptr);
      EXPECT_EQ(reader->find("model.head.weight"),
                reader->find("model.layer0.weight"));
    });
    for (const Layout& target : layouts) {
      with(target, [&](ProcessGroups& groups, auto& model, auto& optimizer,
                       auto& checkpoints) {
        const std::string path =
            dir.file("run/" + step_folder_name(static_cast<int64_t>(i)));
        train(model, optimizer, 9, groups.rank());
        const auto loaded = checkpoints.load(path);
        ASSERT_TRUE(loaded.ok()) << loaded.status();
        const auto reader = ShardedCheckpointReader::open(path).value();
        const auto saved = [&](const std::string& name) -> at::Tensor {
          return reader->tensor(*reader->find(name)).value();
        };
        for (const auto& [name, tensor] : state_of(model)) {
          EXPECT_TRUE(tensor.equal(saved("model." + name))) << name;
        }
        for (const LocalOptimizerState& local : optimizer.local_state()) {
          EXPECT_EQ(local.step,
                    at::Tensor(saved("optim.state." + local.name + ".step"))
                        .template item<float>());
          at::Tensor average = saved("optim.state." + local.name + ".exp_avg");
          if (local.name == "turned") average = average.t();
          if (average.is_complex()) average = at::view_as_real(average);
          EXPECT_TRUE(
              local.tensors[0].second.equal(average.reshape({-1}).narrow(
                  0, local.parameter_offset, local.numel)))
              << local.name;
        }
      });
    }
  }
}

TEST(TrainingCheckpointsTest, EachFileIsItsRanksShare) {
  TempDir dir;
  run_ranks(4, [&](ProcessGroups& groups) {
    at::manual_seed(1);
    auto model =
        fully_shard(torch::nn::Linear(512, 512), groups, ShardOptions())
            .value();
    TrainingCheckpoints checkpoints(dir.file("run"), model, nullptr);
    const std::string folder = checkpoints.save(1, {}).value();
    const auto size = std::filesystem::file_size(
        absl::StrCat(folder, "/__", groups.rank(), "_0.distcp"));
    EXPECT_LE(size, (512 * 512 + 512) * 4 / 4 + (64 << 10));
  });
}

// A save that was started holds the values of its start, whatever happens next.
TEST(TrainingCheckpointsTest, AsyncSavesNeverContainLaterValues) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    auto model =
        fully_shard(std::make_shared<Model>(), groups, layer_units()).value();
    ShardedAdamW optimizer(model, adamw());
    TrainingCheckpoints checkpoints(dir.file("run"), model, &optimizer);
    std::vector<State> states;
    for (int step = 0; step < 4; ++step) {
      train(model, optimizer, step, groups.rank());
      states.push_back(state_of(model));
      EXPECT_TRUE(checkpoints.save_async(step, {}).ok());
      for (at::Tensor& p : model.parameters()) {
        at::NoGradGuard no_grad;
        p.add_(100);
      }
      model.reshard();
      for (at::Tensor& p : model.parameters()) {
        at::NoGradGuard no_grad;
        p.sub_(100);
      }
    }
    EXPECT_TRUE(checkpoints.wait().ok());
    EXPECT_TRUE(checkpoints.wait().ok());
    for (int step = 0; step < 4; ++step) {
      const auto reader = ShardedCheckpointReader::open(
                              dir.file("run/" + step_folder_name(step)))
                              .value();
      for (const auto& [name, tensor] : states[static_cast<size_t>(step)]) {
        EXPECT_TRUE(reader->tensor(*reader->find("model." + name))
                        .value()
                        .equal(tensor))
            << step << name;
      }
    }
  });
}

// One after the other to the same folder, while ranks are late.
TEST(TrainingCheckpointsTest, TheSameStepIsSavedAgainAtOnce) {
  TempDir dir;
  run_ranks(3, [&](ProcessGroups& groups) {
    auto model =
        fully_shard(std::make_shared<Model>(), groups, layer_units()).value();
    TrainingCheckpoints checkpoints(dir.file("run"), model, nullptr);
    for (int i = 0; i < 30; ++i) {
      ASSERT_TRUE(checkpoints.save_async(1, {{"i", absl::StrCat(i)}}).ok());
      if (i % 3 == groups.rank()) usleep(20000);
    }
    ASSERT_TRUE(checkpoints.wait().ok());
    EXPECT_EQ(ShardedCheckpointReader::open(dir.file("run/step-000001"))
                  .value()
                  ->manifest()
                  .state.at("i"),
              "29");
  });
}

// The error of a save in the background comes with the next call.
TEST(TrainingCheckpointsTest, AsyncErrorsSurface) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    auto model =
        fully_shard(std::make_shared<Model>(), groups, layer_units()).value();
    FaultFileSystem full;
    TrainingCheckpointsOptions options;
    if (groups.rank() == 1) options.file_system = &full;
    TrainingCheckpoints checkpoints(dir.file("run"), model, nullptr, options);
    EXPECT_TRUE(checkpoints.save(1, {}).ok());
    full.num_calls = 0;
    full.fail_at = 2;
    EXPECT_TRUE(checkpoints.save_async(2, {}).ok());
    const auto next = checkpoints.save_async(3, {});
    EXPECT_THAT(std::string(next.status().message()),
                HasSubstr("No space left"));
    full.fail_at = -1;
    EXPECT_TRUE(checkpoints.save(4, {}).ok());
    EXPECT_EQ(find_latest_checkpoint(dir.file("run")).path,
              dir.file("run/step-000004"));
    EXPECT_FALSE(std::filesystem::exists(dir.file("run/step-000002")));
  });
}

// Before a rank comes to the others' files, too.
TEST(TrainingCheckpointsTest, AnExceptionOnOneRankReachesAll) {
  class Throwing : public FileSystem {
   public:
    int create(const std::string& path) override {
      if (throws) throw std::bad_alloc();
      return FileSystem::create(path);
    }
    int create_directory(const std::string& path) override {
      if (throws) throw std::bad_alloc();
      return FileSystem::create_directory(path);
    }
    bool throws = false;
  };
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    auto model =
        fully_shard(std::make_shared<Model>(), groups, layer_units()).value();
    for (int failing : {0, 1}) {
      Throwing throwing;
      TrainingCheckpointsOptions options;
      if (groups.rank() == failing) options.file_system = &throwing;
      const std::string folder = dir.file(absl::StrCat("run", failing));
      TrainingCheckpoints checkpoints(folder, model, nullptr, options);
      throwing.throws = true;
      EXPECT_FALSE(checkpoints.save(1, {}).ok());
      const auto started = checkpoints.save_async(2, {});
      EXPECT_EQ(started.ok(), failing == 1);  // Else nothing can be prepared.
      EXPECT_EQ(checkpoints.wait().ok(), failing == 0);
      // A failed save is no reason not to load.
      throwing.throws = false;
      ASSERT_TRUE(checkpoints.save(3, {}).ok());
      throwing.throws = true;
      (void)checkpoints.save_async(4, {});
      EXPECT_TRUE(checkpoints.load(folder + "/latest").ok());
      EXPECT_FALSE(std::filesystem::exists(folder + "/step-000004"));
    }
  });
}

TEST(TrainingCheckpointsTest, WrongOptionsAreRefused) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    auto model =
        fully_shard(std::make_shared<Model>(), groups, layer_units()).value();
    auto other =
        fully_shard(std::make_shared<Model>(), groups, layer_units()).value();
    ShardedAdamW optimizer(other, adamw());
    ShardedEma ema(other, 10);
    const auto message = [&](const TrainingCheckpointsOptions& options,
                             ShardedOptimizer* used = nullptr) {
      try {
        TrainingCheckpoints(dir.file("run"), model, used, options);
      } catch (const c10::Error& error) {
        return std::string(error.what_without_backtrace());
      }
      return std::string("none");
    };
    TrainingCheckpointsOptions options;
    EXPECT_EQ(message(options), "none");
    EXPECT_THAT(message(options, &optimizer),
                HasSubstr("the optimizer is of another model"));
    options.ema = &ema;
    EXPECT_THAT(message(options), HasSubstr("the average is of another model"));
    for (const char* key : {"", "ema", "rng", "optim"}) {
      options = {};
      options.model_key = key;
      EXPECT_THAT(message(options), HasSubstr("expected two different keys"));
    }
    options = {};
    options.keep_last = -1;
    EXPECT_THAT(message(options), HasSubstr("keep_last -1"));
    options = {};
    options.timeout = std::chrono::milliseconds(0);
    EXPECT_THAT(message(options), HasSubstr("timeout 0 ms"));
  });
}

TEST(TrainingCheckpointsTest, OldOnesAreRemovedButTheKept) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    auto model =
        fully_shard(std::make_shared<Model>(), groups, layer_units()).value();
    TrainingCheckpointsOptions options;
    options.keep_last = 2;
    options.keep_every = 4;
    TrainingCheckpoints checkpoints(dir.file("run"), model, nullptr, options);
    for (int step = 1; step <= 10; ++step) {
      ASSERT_TRUE(checkpoints.save_async(step, {}).ok());
    }
    ASSERT_TRUE(checkpoints.wait().ok());
    groups.world()->barrier()->wait();
    std::vector<std::string> names;
    for (const std::string& path : list_step_folders(dir.file("run"))) {
      names.push_back(std::filesystem::path(path).filename());
    }
    EXPECT_THAT(names, ElementsAre("step-000010", "step-000009", "step-000008",
                                   "step-000004"));
    EXPECT_EQ(std::filesystem::read_symlink(dir.file("run/latest")),
              "step-000010");
  });
}

struct Other : torch::nn::Module {
  Other(int64_t width, at::ScalarType dtype, bool more) {
    register_parameter("a", at::ones({width, 2}).to(dtype));
    if (more) register_parameter("b", at::ones({3}));
  }
};

TEST(TrainingCheckpointsTest, WhatDoesNotFitIsNamedAndNothingChanges) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    const auto make = [&](int64_t width, at::ScalarType dtype, bool more) {
      return fully_shard(std::make_shared<Other>(width, dtype, more), groups,
                         ShardOptions())
          .value();
    };
    const auto save = [&](const char* name, int64_t width, at::ScalarType dtype,
                          bool more) {
      auto model = make(width, dtype, more);
      for (at::Tensor& p : model.parameters()) {
        at::NoGradGuard no_grad;
        p.fill_(2);
      }
      TrainingCheckpoints checkpoints(dir.file(name), model, nullptr);
      EXPECT_TRUE(checkpoints.save(1, {}).ok());
      return dir.file(std::string(name) + "/latest");
    };
    auto model = make(4, at::kFloat, true);
    const State before = state_of(model);
    TrainingCheckpoints checkpoints(dir.file("x"), model, nullptr);
    const auto message = [&](const std::string& path) {
      const auto loaded = checkpoints.load(path);
      expect_equal(state_of(model), before);
      return std::string(loaded.status().message());
    };
    EXPECT_THAT(message(save("missing", 4, at::kFloat, false)),
                HasSubstr("'model.b' is missing"));
    EXPECT_THAT(message(save("shape", 5, at::kFloat, true)),
                HasSubstr("'model.a': expected shape [4, 2], got [5, 2]"));
    const std::string half = save("dtype", 4, at::kHalf, true);
    EXPECT_THAT(message(half),
                HasSubstr("'model.a': expected dtype Float, got Half"));
    EXPECT_THAT(message(dir.file("nothing")), HasSubstr("expected the folder"));
    TrainingCheckpointsOptions cast;
    cast.cast_dtypes = true;
    TrainingCheckpoints casting(dir.file("x"), model, nullptr, cast);
    EXPECT_TRUE(casting.load(half).ok());
    EXPECT_TRUE(state_of(model)["a"].equal(at::full({4, 2}, 2.f)));
    auto smaller = make(4, at::kFloat, false);
    TrainingCheckpoints into(dir.file("x"), smaller, nullptr);
    EXPECT_THAT(
        std::string(
            into.load(save("more", 4, at::kFloat, true)).status().message()),
        HasSubstr("unexpected key 'model.b'"));
  });
}

}  // namespace
}  // namespace fullshard
