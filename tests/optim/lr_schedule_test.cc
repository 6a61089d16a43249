#include "fullshard/optim/lr_schedule.h"

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

TEST(LrScheduleTest, RatioMustBeAPart) {
  EXPECT_FALSE(LrSchedule::create(kCosine, 10, 1.5).ok());
  EXPECT_FALSE(LrSchedule::create(kCosine, 10, -0.1).ok());
  EXPECT_FALSE(LrSchedule::create(kCosine, -1, 0.1).ok());
}

}  // namespace
}  // namespace fullshard
