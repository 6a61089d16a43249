// The two programs as a user runs them.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "fullshard/io/atomic_file.h"
#include "fullshard/io/pt_writer.h"
#include "fullshard/io/zip_writer.h"
#include "fullshard/tests/io/public_checkpoints.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"

namespace fullshard {
namespace {

struct Result {
  int status;
  std::string output;  // of both streams
};

Result run_tool(const std::string& command) {
  Result result{-1, ""};
  FILE* const pipe =
      ::popen(absl::StrCat("tools/", command, " 2>&1").c_str(), "r");
  char buffer[4096];
  while (const size_t size = std::fread(buffer, 1, sizeof(buffer), pipe)) {
    result.output.append(buffer, size);
  }
  const int status = ::pclose(pipe);
  if (WIFEXITED(status)) result.status = WEXITSTATUS(status);
  return result;
}

TEST(ToolsTest, InspectAndConvertWork) {
  TempDir dir;
  auto writer = PtWriter::create(dir.file("a.pt")).value();
  ASSERT_TRUE(
      writer->tensor("a", make_tensor(c10::ScalarType::Float, {2, 3})).ok());
  ASSERT_TRUE(writer->commit().ok());
  const Result table = run_tool("inspect " + dir.file("a.pt"));
  EXPECT_EQ(table.status, 0);
  EXPECT_TRUE(
      absl::StrContains(table.output, "a     float32  [2, 3]  24 bytes"))
      << table.output;
  const Result done =
      run_tool(absl::StrCat("convert ", dir.file("a.pt"), " ", dir.file("b")));
  EXPECT_EQ(done.status, 0) << done.output;
  EXPECT_TRUE(absl::StrContains(done.output, "1 tensors, 24 bytes"))
      << done.output;
  const Result json = run_tool("inspect --json " + dir.file("b"));
  EXPECT_TRUE(absl::StrContains(json.output, "\"format\": \"safetensors\""))
      << json.output;
}

// What a pickle would run in Python is refused by name and not run.
TEST(ToolsTest, InspectRunsNothing) {
  TempDir dir;
  const std::string path = dir.file("evil.pt");
  auto file = AtomicFile::create(path).value();
  ZipWriter zip(file->sink());
  const std::string body = absl::StrCat("touch ", dir.file("ran"));
  ASSERT_TRUE(
      zip.add("a/data.pkl",
              absl::StrCat("\x80\x02", "cposix\nsystem\nU",
                           std::string(1, static_cast<char>(body.size())), body,
                           "\x85R."))
          .ok());
  ASSERT_TRUE(zip.finish().ok());
  ASSERT_TRUE(file->commit().ok());
  const Result result = run_tool("inspect " + path);
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(
      absl::StrContains(result.output, "refused to load \"posix.system\""))
      << result.output;
  EXPECT_EQ(dir.names(), std::vector<std::string>{"evil.pt"});
}

TEST(ToolsTest, MistakesAreOneLine) {
  TempDir dir;
  const std::pair<std::string, const char*> cases[] = {
      {dir.write("empty.pt", ""), "is empty"},
      {dir.write("lfs.pt", "version https://git-lfs.github.com/spec/v1\n"),
       "Git-LFS pointer"},
      {dir.write("page.pt", "<!DOCTYPE html>"), "web page"},
      {dir.write("cut.pt", "PK"), "cut short"},
      {dir.write("x.pt", "hello"), "not a checkpoint"},
      {dir.file("none.pt"), "No such file"}};
  for (size_t i = 0; i < std::size(cases); ++i) {
    const Result result = run_tool("inspect " + cases[i].first);
    EXPECT_EQ(result.status, 1);
    EXPECT_TRUE(absl::StartsWith(result.output, "error: ")) << result.output;
    EXPECT_TRUE(absl::StrContains(result.output, cases[i].second))
        << result.output;
    EXPECT_EQ(result.output.find('\n'), result.output.size() - 1);
  }
  EXPECT_EQ(run_tool("inspect").status, 2);
  EXPECT_EQ(run_tool("convert a").status, 2);
  EXPECT_EQ(run_tool("convert --to=x a b").status, 1);
}

TEST(ToolsTest, PublicCheckpointsAreListed) {
  if (!have_public_checkpoints()) GTEST_SKIP();
  const std::pair<const char*, const char*> cases[] = {
      {kZipCheckpoint, ": pt, 44 tensors"},
      {"facenet_pytorch/data/onet.pt", ": legacy pt, 21 tensors"},
      {"lpips/weights/v0.0/alex.pth", ": legacy pt, 5 tensors"},
      {kSafetensorsCheckpoint, ": safetensors, "},
      {kLargeSafetensorsFolder, ": safetensors, 104 tensors, 86.6 MiB"},
      {kTorchScript, "a TorchScript archive"}};
  for (const auto& [name, expected] : cases) {
    const Result result = run_tool("inspect " + public_checkpoint(name));
    EXPECT_TRUE(absl::StrContains(result.output, expected)) << result.output;
  }
}

// Two layers of 6 and 3 elements and a root of 5, in fp32.
std::string write_layers(TempDir& dir) {
  auto writer = PtWriter::create(dir.file("layers.pt")).value();
  const auto add = [&](const char* name, std::vector<int64_t> sizes) {
    EXPECT_TRUE(
        writer->tensor(name, make_tensor(c10::ScalarType::Float, sizes)).ok());
  };
  add("model.layers.0.weight", {2, 3});
  add("model.layers.0.bias", {3});
  add("model.layers.1.weight", {2, 3});
  add("model.layers.1.bias", {3});
  add("head", {5});
  EXPECT_TRUE(writer->commit().ok());
  return dir.file("layers.pt");
}

void expect_output(const Result& result, int status, const std::string& text) {
  EXPECT_EQ(result.status, status) << result.output;
  EXPECT_TRUE(absl::StrContains(result.output, text)) << result.output;
}

TEST(ToolsTest, PlanOfACheckpoint) {
  TempDir dir;
  const std::string file = write_layers(dir);
  const Result plan = run_tool("plan --nproc=2 " + file);
  expect_output(plan, 0, "2 ranks: shard groups of 2, 1 replica");
  // 6 elements, a gap of 2, 3 elements, and 1 to make two chunks of 8: 16.
  expect_output(plan, 0,
                "model.layers.0        2              9        7       64 B"
                "       32 B   1+1   1");
  expect_output(run_tool("plan --nproc=2 --param_dtype=bf16 " + file), 0,
                "32 B");
  expect_output(run_tool("plan --nproc=2 --unit='model[.]layers' " + file), 0,
                "model.layers          4             18");
}

TEST(ToolsTest, PlanOfAConfig) {
  TempDir dir;
  FILE* const config = std::fopen(dir.file("train.yaml").c_str(), "w");
  std::fputs("stage: full-finetune\n", config);
  std::fclose(config);
  const Result plan =
      run_tool("plan --nproc=1024 --config=" + dir.file("train.yaml"));
  expect_output(plan, 0, "1024 ranks: shard groups of 1024, 1 replica");
  expect_output(plan, 0, "llm_backbone");
  expect_output(plan, 0, "projector");
}

TEST(ToolsTest, PlanSaysWhatIsWrong) {
  TempDir dir;
  const std::string file = write_layers(dir);
  expect_output(run_tool("plan"), 2, "usage: ");
  expect_output(run_tool("plan --nproc=6 --shard_group_size=4 " + file), 1,
                "--shard_group_size: expected a divisor of the 6 ranks of "
                "--nproc, got 4");
  expect_output(run_tool("plan --nproc=0 " + file), 1,
                "--nproc: expected at least 1, got 0");
  expect_output(run_tool("plan --param_dtype=int8 " + file), 1,
                "--param_dtype: expected fp32, bf16 or fp16, got 'int8'");
  expect_output(run_tool("plan --strategy=all " + file), 1,
                "--strategy: expected full-shard, shard-grad-op or no-shard, "
                "got 'all'");
  expect_output(run_tool("plan --unit='(' " + file), 1,
                "--unit: expected a regular expression, got '('");
  expect_output(run_tool("plan --unit=nothing " + file), 1,
                "--unit: 'nothing' matches the beginning of no name in ");
  expect_output(run_tool("plan " + dir.file("absent.pt")), 1, "absent.pt");
}

}  // namespace
}  // namespace fullshard
