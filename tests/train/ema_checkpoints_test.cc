// Moving averages in sharded checkpoints.

#include <memory>
#include <string>

#include "ATen/ATen.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/optim/ema.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "fullshard/tests/train/odd_model.h"
#include "fullshard/training_checkpoints.h"
#include "gmock/gmock.h"

namespace fullshard {
namespace {

using testing::expect_equal;
using ::testing::HasSubstr;
using testing::layer_units;
using testing::OddModel;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::State;

State averages_of(const ShardedEma& ema) {
  State state;
  EXPECT_TRUE(ema.full_state_dict(
                     [&](const std::string& name, const at::Tensor& tensor) {
                       state[name] = tensor.clone();
                       return absl::OkStatus();
                     },
                     /*all_ranks=*/true)
                  .ok());
  return state;
}

// A model of which every part is there, also of an average.
struct Job {
  Job(ProcessGroups& groups, const std::string& folder, bool units,
      bool averaged = true)
      : model(fully_shard(std::make_shared<OddModel>(), groups,
                          units ? layer_units() : ShardOptions())
                  .value()),
        optimizer(model, AdamWOptions()),
        ema(model, 3),
        checkpoints(folder, model, &optimizer, options(averaged)) {}

  TrainingCheckpointsOptions options(bool averaged) {
    TrainingCheckpointsOptions options;
    options.ema = averaged ? &ema : nullptr;
    options.copy_in_background = true;
    return options;
  }
  void train(double factor) {
    model(at::ones({2, 7}) * factor).backward();
    optimizer.step();
    optimizer.zero_grad();
    ema.update();
  }

  FullyShardedModule<OddModel> model;
  ShardedAdamW optimizer;
  ShardedEma ema;
  TrainingCheckpoints checkpoints;
};

struct Layout {
  int ranks;
  int shard_group_size;
  bool units;
};

TEST(EmaCheckpointsTest, LoadsInEveryLayout) {
  const Layout layouts[] = {{1, 0, true}, {3, 0, false}, {4, 2, true}};
  for (const Layout& from : layouts) {
    for (const Layout& to : layouts) {
      TempDir dir;
      RunRanksOptions run;
      run.shard_group_size = from.shard_group_size;
      run_ranks(
          from.ranks,
          [&](ProcessGroups& groups) {
            Job job(groups, dir.file("run"), from.units);
            job.train(1);
            const State before = averages_of(job.ema);
            const auto saved = job.checkpoints.save_async(1, {});
            ASSERT_TRUE(saved.ok()) << saved.status();
            job.ema.update();  // Too late to be in it.
            job.train(2);
            ASSERT_TRUE(job.checkpoints.wait().ok());
            const auto reader = ShardedCheckpointReader::open(*saved).value();
            for (const auto& [name, tensor] : before) {
              EXPECT_TRUE(reader->tensor(*reader->find("ema." + name))
                              .value()
                              .equal(tensor))
                  << name;
            }
          },
          run);
      run.shard_group_size = to.shard_group_size;
      run_ranks(
          to.ranks,
          [&](ProcessGroups& groups) {
            Job job(groups, dir.file("run"), to.units);
            job.train(5);
            const auto loaded = job.checkpoints.load(dir.file("run/latest"));
            ASSERT_TRUE(loaded.ok()) << loaded.status();
            const auto reader =
                ShardedCheckpointReader::open(dir.file("run/latest")).value();
            const State averages = averages_of(job.ema);
            EXPECT_EQ(averages.count("turned"), 1u);
            EXPECT_EQ(averages.count("frozen"), 0u);
            for (const auto& [name, tensor] : averages) {
              EXPECT_TRUE(reader->tensor(*reader->find("ema." + name))
                              .value()
                              .equal(tensor))
                  << name;
            }
          },
          run);
    }
  }
}

TEST(EmaCheckpointsTest, GoesOnWithTheSameBits) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    Job job(groups, dir.file("run"), true);
    job.model->eval();  // No dropout.
    job.train(1);
    job.train(2);
    ASSERT_TRUE(job.checkpoints.save(2, {}).ok());
    job.train(3);
    Job again(groups, dir.file("run"), true);
    again.model->eval();
    ASSERT_TRUE(again.checkpoints.load(dir.file("run/latest")).ok());
    again.train(3);
    expect_equal(averages_of(again.ema), averages_of(job.ema));
  });
}

TEST(EmaCheckpointsTest, WhatIsMissingOrSwappedInIsSaid) {
  TempDir dir;
  run_ranks(2, [&](ProcessGroups& groups) {
    Job without(groups, dir.file("without"), true, /*averaged=*/false);
    Job job(groups, dir.file("with"), true);
    job.train(1);
    ASSERT_TRUE(without.checkpoints.save(1, {}).ok());
    const State before = averages_of(job.ema);
    EXPECT_THAT(std::string(job.checkpoints.load(dir.file("without/latest"))
                                .status()
                                .message()),
                HasSubstr("is missing"));
    expect_equal(averages_of(job.ema), before);

    ASSERT_TRUE(job.checkpoints.save(1, {}).ok());
    EXPECT_TRUE(without.checkpoints.load(dir.file("with/latest")).ok());

    const ShardedEma::Scope scope(job.ema);
    EXPECT_THAT(
        std::string(job.checkpoints.save(2, {}).status().message()),
        HasSubstr("while the average is swapped in: call swap_out() before"));
    EXPECT_THAT(
        std::string(
            job.checkpoints.load(dir.file("with/latest")).status().message()),
        HasSubstr("call swap_out() before"));
  });
}

}  // namespace
}  // namespace fullshard
