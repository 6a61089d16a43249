#include "fullshard/optim/lr_schedule.h"

#include "fullshard/tests/optim/goldens.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using ::testing::HasSubstr;

constexpr char kCosine[] = "linear-warmup+cosine-decay";

TEST(LrScheduleTest, WarmsUpAndDecays) {
  const LrSchedule schedule = LrSchedule::create(kCosine, 10, 0.3).value();
  EXPECT_EQ(schedule.warmup_steps(), 3);
  const double expected[] = {0,     1. / 3, 2. / 3, 1,     .9505,
                             .8117, .6113,  .3887,  .1883, .0495};
  for (int k = 0; k < 10; ++k) {
    EXPECT_NEAR(schedule.factor(k), expected[k], 5e-5) << "step " << k;
  }
}

TEST(LrScheduleTest, StaysAtItsEndValue) {
  const LrSchedule schedule = LrSchedule::create(kCosine, 10, 0.3).value();
  EXPECT_NEAR(schedule.factor(10), 0, 1e-12);
  EXPECT_NEAR(schedule.factor(1000), 0, 1e-12);
}

TEST(LrScheduleTest, FirstStepIsZeroAlsoWithoutWarmup) {
  const LrSchedule schedule = LrSchedule::create(kCosine, 10, 0).value();
  EXPECT_EQ(schedule.factor(0), 0);
  EXPECT_NEAR(schedule.factor(1), 0.97553, 1e-5);
}

TEST(LrScheduleTest, WarmupStepsAreRoundedDown) {
  EXPECT_EQ(LrSchedule::create(kCosine, 5198, 0.03)->warmup_steps(), 155);
}

TEST(LrScheduleTest, ConstantHasNoWarmup) {
  const LrSchedule schedule = LrSchedule::create("constant", 10, 0.3).value();
  EXPECT_EQ(schedule.warmup_steps(), 0);
  EXPECT_EQ(schedule.factor(0), 1);
  EXPECT_EQ(schedule.factor(99), 1);
}

TEST(LrScheduleTest, UnknownTypeListsTheKnownOnes) {
  const auto schedule = LrSchedule::create("cosine", 10, 0.3);
  EXPECT_THAT(std::string(schedule.status().message()), HasSubstr(kCosine));
  EXPECT_THAT(std::string(schedule.status().message()), HasSubstr("'cosine'"));
}

TEST(LrScheduleTest, EqualsTransformers) {
  const nlohmann::json golden = testing::read_golden("lr_schedule.json");
  ASSERT_GT(golden["cases"].size(), 10u);
  for (const nlohmann::json& item : golden["cases"]) {
    LrScheduleOptions options;
    options.type = item["type"];
    options.total_steps = golden["total_steps"];
    const nlohmann::json& given = item["options"];
    options.warmup_steps = given["warmup_steps"].get<int64_t>();
    options.min_lr_ratio = given.value("min_lr_ratio", 0.0);
    options.decay_ratio = given.value("decay_ratio", 0.1);
    options.decay_shape = given.value("decay_shape", "cosine");
    const LrSchedule schedule = LrSchedule::create(options).value();
    for (size_t k = 0; k < item["factors"].size(); ++k) {
      EXPECT_NEAR(schedule.factor(static_cast<int64_t>(k)),
                  item["factors"][k].get<double>(), 1e-12)
          << options.type << " " << given << " at step " << k;
    }
  }
}

TEST(LrScheduleTest, EveryTypeStaysAtItsEndValue) {
  for (const std::string& type : LrSchedule::types()) {
    const LrSchedule schedule = LrSchedule::create(type, 40, 0.1).value();
    EXPECT_EQ(schedule.factor(40), schedule.factor(41)) << type;
    EXPECT_EQ(schedule.factor(40), schedule.factor(1 << 30)) << type;
  }
}

TEST(LrScheduleTest, TableShowsEveryPhase) {
  LrScheduleOptions options;
  options.type = "warmup-stable-decay";
  options.total_steps = 100;
  options.warmup_ratio = 0.1;
  options.decay_ratio = 0.5;
  options.decay_shape = "linear";
  EXPECT_EQ(LrSchedule::create(options)->table(0.01, 3),
            "    step  phase     factor        rate\n"
            "       0  warmup  0.000000  0.0000e+00\n"
            "      10  stable  1.000000  1.0000e-02\n"
            "      50  decay   1.000000  1.0000e-02\n"
            "     100  end     0.000000  0.0000e+00\n");
}

TEST(LrScheduleTest, TableOfNoSteps) {
  EXPECT_THAT(LrSchedule::create("constant", 0, 0)->table(1e-3, 1),
              HasSubstr("1.0000e-03"));
}

TEST(LrScheduleTest, PhasesMustFit) {
  LrScheduleOptions options;
  options.type = "warmup-stable-decay";
  options.total_steps = 10;
  options.warmup_ratio = 0.6;
  options.decay_ratio = 0.5;
  EXPECT_THAT(std::string(LrSchedule::create(options).status().message()),
              HasSubstr("fit into 10 steps, got 6 and 5"));
  options.decay_ratio = 0.4;
  EXPECT_TRUE(LrSchedule::create(options).ok());
  options.decay_shape = "exponential";
  EXPECT_THAT(std::string(LrSchedule::create(options).status().message()),
              HasSubstr("linear, cosine, 1-sqrt"));
}

TEST(LrScheduleTest, FloorNeedsADecay) {
  LrScheduleOptions options;
  options.total_steps = 10;
  options.min_lr_ratio = 0.1;
  EXPECT_EQ(LrSchedule::create(options)->factor(10), 0.1);
  options.type = "constant";
  EXPECT_FALSE(LrSchedule::create(options).ok());
  options.type = "linear-warmup+cosine-decay";
  options.min_lr_ratio = -0.1;
  EXPECT_FALSE(LrSchedule::create(options).ok());
}

TEST(LrScheduleTest, RatioMustBeAPart) {
  EXPECT_FALSE(LrSchedule::create(kCosine, 10, 1.5).ok());
  EXPECT_FALSE(LrSchedule::create(kCosine, 10, -0.1).ok());
  EXPECT_FALSE(LrSchedule::create(kCosine, -1, 0.1).ok());
  LrScheduleOptions options;
  options.warmup_steps = -1;
  EXPECT_FALSE(LrSchedule::create(options).ok());
}

}  // namespace
}  // namespace fullshard
