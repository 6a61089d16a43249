#include "fullshard/terminal/progress_line.h"

#include <gtest/gtest.h>

namespace fullshard {
namespace {

// Standard error is a file while it is captured, so not a terminal.
TEST(ProgressLineTest, WritesPlainLinesSeldomWhereThereIsNoTerminal) {
  testing::internal::CaptureStderr();
  {
    ProgressLine line(/*seconds_between=*/3600);
    line.show("step 1");
    line.show("step 2");
    line.show("step 3", /*last=*/true);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "step 1\nstep 3\n");
}

TEST(ProgressLineTest, WritesEveryLineIfNoTimeIsToPass) {
  testing::internal::CaptureStderr();
  {
    ProgressLine line(/*seconds_between=*/0);
    line.show("a");
    line.show("b");
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "a\nb\n");
}

TEST(FormatDurationTest, ShowsHoursOnlyWhereThereAreSome) {
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(64.6), "1:05");
  EXPECT_EQ(format_duration(59 * 60 + 59), "59:59");
  EXPECT_EQ(format_duration(2 * 3600 + 3 * 60 + 4), "2:03:04");
}

TEST(FormatDurationTest, NothingIsLeftOfANegativeTime) {
  EXPECT_EQ(format_duration(-3), "0:00");
}

}  // namespace
}  // namespace fullshard
