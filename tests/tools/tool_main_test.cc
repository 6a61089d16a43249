#include "fullshard/tools/tool_main.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "fullshard/io/mapped_file.h"
#include "fullshard/tests/io/temp_dir.h"

namespace fullshard {
namespace {

TEST(ToolMainDeathTest, AFileCutShortIsOneLine) {
  TempDir dir;
  const std::string path = dir.write("a", std::string(100'000, 'x'));
  EXPECT_EXIT(
      {
        explain_cut_files();
        const auto file = MappedFile::open(path).value();
        std::filesystem::resize_file(path, 10);
        std::exit(file->bytes()[90'000]);
      },
      testing::ExitedWithCode(1), "error: a file was cut short");
}

TEST(ToolMainTest, PathsAreMeantFromWhereTheUserStands) {
  ::unsetenv("BUILD_WORKING_DIRECTORY");
  EXPECT_EQ(user_file("a"), "a");
  ::setenv("BUILD_WORKING_DIRECTORY", "/home/x", 1);
  EXPECT_EQ(user_file("a"), "/home/x/a");
  EXPECT_EQ(user_file("/a"), "/a");
}

TEST(ToolMainTest, FailuresGiveTheExitStatus) {
  EXPECT_EQ(report(absl::OkStatus()), 0);
  EXPECT_EQ(report(absl::NotFoundError("x")), 1);
}

}  // namespace
}  // namespace fullshard
