#include "fullshard/io/full_state_dict.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <string>

#include "fullshard/tests/io/fault_file_system.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"

namespace fullshard {
namespace {

using c10::ScalarType;

FullStateDictOptions example_options() {
  FullStateDictOptions options;
  options.module_keys = {"projector", "llm_backbone"};
  options.all_module_keys = {"vision_backbone", "llm_backbone", "projector"};
  options.names = {"vision_backbone.patch.weight", "projector.0.weight",
                   "projector.0.bias", "llm_backbone.llm.model.embed.weight",
                   "llm_backbone.llm.head.weight"};
  return options;
}

at::Tensor example_tensor(const std::string& name, unsigned seed = 0) {
  return make_tensor(ScalarType::BFloat16,
                     {static_cast<int64_t>(name.size()), 3},
                     seed + static_cast<unsigned>(name.size()));
}

// Writes the example with the last unit first.
absl::Status write_example(const std::string& path, unsigned seed = 0,
                           FileSystem* file_system = nullptr) {
  FullStateDictOptions options = example_options();
  options.file_system = file_system;
  auto writer = FullStateDictWriter::create(path, options);
  if (!writer.ok()) return writer.status();
  for (auto name = options.names.rbegin(); name != options.names.rend();
       ++name) {
    absl::Status status = (*writer)->add(*name, example_tensor(*name, seed));
    if (!status.ok()) return status;
  }
  return (*writer)->commit();
}

std::unique_ptr<FullStateDictReader> open(const std::string& path) {
  auto reader = FullStateDictReader::open(path);
  EXPECT_TRUE(reader.ok()) << reader.status();
  return *std::move(reader);
}

TEST(CheckpointNameTest, FollowsTheFormat) {
  EXPECT_EQ(checkpoint_name(123, 4, 0.56784),
            "step-000123-epoch-04-loss=0.5678.pt");
  EXPECT_EQ(checkpoint_name(1234567, 123, 12.0),
            "step-1234567-epoch-123-loss=12.0000.pt");
  EXPECT_EQ(checkpoint_name(0, 0, std::nullopt),
            "step-000000-epoch-00-loss=inf.pt");
  EXPECT_EQ(checkpoint_name(0, 0, HUGE_VAL),
            "step-000000-epoch-00-loss=inf.pt");
}

TEST(FullStateDictTest, OrderOfArrivalDoesNotMatter) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  const absl::Status status = write_example(path);
  ASSERT_TRUE(status.ok()) << status;
  auto reader = open(path);
  EXPECT_EQ(reader->module_keys(),
            (std::vector<std::string>{"projector", "llm_backbone"}));
  EXPECT_EQ(reader->names(),
            (std::vector<std::string>{"projector.0.weight", "projector.0.bias",
                                      "llm_backbone.llm.model.embed.weight",
                                      "llm_backbone.llm.head.weight"}));
  for (const std::string& name : reader->names()) {
    EXPECT_TRUE(bit_equal(*reader->tensor(name), example_tensor(name)));
  }
  EXPECT_TRUE(reader->verify().ok());
  EXPECT_FALSE(reader->contains("vision_backbone.patch.weight"));
  EXPECT_EQ(reader->tensor("x").status().code(), absl::StatusCode::kNotFound);
}

TEST(FullStateDictTest, BuffersMayBeUsedAgainAtOnce) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  FullStateDictOptions options;
  options.module_keys = {"m"};
  options.names = {"m.a", "m.b", "m.c"};
  const at::Tensor a = make_tensor(ScalarType::Float, {8}, 1);
  const at::Tensor b = make_tensor(ScalarType::Float, {8}, 2);
  at::Tensor buffer = make_tensor(ScalarType::Float, {8});
  {
    auto writer = *FullStateDictWriter::create(path, options);
    std::memcpy(buffer.data_ptr(), a.const_data_ptr(), a.nbytes());
    ASSERT_TRUE(writer->add("m.a", buffer).ok());
    std::memcpy(buffer.data_ptr(), b.const_data_ptr(), b.nbytes());
    ASSERT_TRUE(writer->add("m.b", buffer).ok());
    ASSERT_TRUE(writer->add_tied("m.c", "m.a").ok());
    ASSERT_TRUE(writer->commit().ok());
  }
  auto reader = open(path);
  EXPECT_TRUE(bit_equal(*reader->tensor("m.a"), a));
  EXPECT_TRUE(bit_equal(*reader->tensor("m.b"), b));
  EXPECT_TRUE(bit_equal(*reader->tensor("m.c"), a));
}

TEST(FullStateDictTest, WrongNamesAreErrors) {
  TempDir dir;
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const at::Tensor tensor = make_tensor(ScalarType::Float, {1});
  FullStateDictOptions options = example_options();
  options.names.push_back("projector2.weight");
  EXPECT_EQ(FullStateDictWriter::create(dir.file("a"), options).status().code(),
            invalid);
  options = example_options();
  options.names.push_back("projector.0.bias");
  EXPECT_EQ(FullStateDictWriter::create(dir.file("a"), options).status().code(),
            invalid);

  auto writer = *FullStateDictWriter::create(dir.file("a"), example_options());
  EXPECT_EQ(writer->add("other.weight", tensor).code(), invalid);
  EXPECT_EQ(writer->add("projector.9.weight", tensor).code(), invalid);
  EXPECT_TRUE(writer->add("vision_backbone.unannounced", tensor).ok());
  EXPECT_TRUE(writer->add("projector.0.bias", tensor).ok());
  EXPECT_EQ(writer->add("projector.0.bias", tensor).code(), invalid);
  EXPECT_EQ(writer->add_tied("projector.0.weight", "none").code(), invalid);
  const absl::Status missing = writer->commit();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(missing.message().find("\"projector.0.weight\""),
            std::string::npos);
  writer.reset();
  EXPECT_TRUE(dir.names().empty());
}

TEST(FullStateDictTest, FlatDictsAreRead) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  const at::Tensor tensor = make_tensor(ScalarType::Float, {4});
  for (const bool nested : {true, false}) {
    auto writer = *PtWriter::create(path);
    if (nested) {
      ASSERT_TRUE(writer->begin_dict("model").ok());
    }
    ASSERT_TRUE(writer->tensor("projector.0.weight", tensor).ok());
    if (nested) {
      ASSERT_TRUE(writer->end_dict().ok());
    }
    ASSERT_TRUE(writer->commit().ok());
    auto reader = open(path);
    EXPECT_TRUE(reader->module_keys().empty());
    EXPECT_EQ(reader->names(), std::vector<std::string>{"projector.0.weight"});
    EXPECT_TRUE(bit_equal(*reader->tensor("projector.0.weight"), tensor));
  }
}

TEST(FullStateDictTest, OtherContentIsNamed) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  {
    auto writer = *PtWriter::create(path);
    ASSERT_TRUE(writer->begin_dict("model").ok());
    ASSERT_TRUE(writer->begin_dict("projector").ok());
    ASSERT_TRUE(writer->value("0.weight", int64_t{1}).ok());
    ASSERT_TRUE(writer->end_dict().ok());
    ASSERT_TRUE(writer->end_dict().ok());
    ASSERT_TRUE(writer->commit().ok());
  }
  const absl::Status status = FullStateDictReader::open(path).status();
  EXPECT_EQ(status.message(),
            path +
                ": \"model\" / \"projector\" / \"0.weight\" is an integer, "
                "expected a tensor");
}

TEST(FullStateDictTest, KilledAnywhereTheOldOrTheNewFileLoads) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  ASSERT_TRUE(write_example(path).ok());
  bool finished = false;
  int num_killed = 0;
  while (!finished) {
    const pid_t child = ::fork();
    if (child == 0) {
      FaultFileSystem file_system;
      file_system.fault = FaultFileSystem::Fault::kKill;
      file_system.fail_at = num_killed;
      ::_exit(write_example(path, 100, &file_system).ok() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    finished = WIFEXITED(status);
    if (finished) {
      EXPECT_EQ(WEXITSTATUS(status), 0);
    }
    auto reader = open(path);
    EXPECT_TRUE(reader->verify().ok());
    const std::string name = "projector.0.bias";
    const at::Tensor tensor = *reader->tensor(name);
    const bool is_old = bit_equal(tensor, example_tensor(name));
    EXPECT_TRUE(is_old || bit_equal(tensor, example_tensor(name, 100)));
    EXPECT_TRUE(!finished || !is_old);
    if (!finished) ++num_killed;
    ASSERT_LT(num_killed, 100);
  }
  EXPECT_GE(num_killed, 5);
}

TEST(UpdateLatestTest, LinksRelativelyAndReplaces) {
  TempDir dir;
  const std::string first = dir.write("step-1.pt", "one");
  const std::string second = dir.write("step-2.pt", "two");
  ASSERT_TRUE(update_latest(first).ok());
  EXPECT_EQ(read_file(dir.file("latest-checkpoint.pt")), "one");
  ASSERT_TRUE(update_latest(second).ok());
  EXPECT_EQ(std::filesystem::read_symlink(dir.file("latest-checkpoint.pt")),
            "step-2.pt");
  EXPECT_EQ(dir.names().size(), 3u);
}

TEST(UpdateLatestTest, CopiesWhereLinksFail) {
  TempDir dir;
  const std::string path = dir.write("step-1.pt", "one");
  FaultFileSystem file_system;
  file_system.fail_at = 0;
  file_system.error = EPERM;
  ASSERT_TRUE(update_latest(path, file_system).ok());
  const std::string latest = dir.file("latest-checkpoint.pt");
  EXPECT_FALSE(std::filesystem::is_symlink(latest));
  EXPECT_EQ(read_file(latest), "one");
  EXPECT_FALSE(update_latest(dir.file("none/step-1.pt")).ok());
}

TEST(ResolveCheckpointTest, FindsFilesAndFolders) {
  TempDir dir;
  EXPECT_EQ(resolve_checkpoint(dir.file("none")).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(resolve_checkpoint(dir.file("")).status().code(),
            absl::StatusCode::kNotFound);
  std::filesystem::create_directory(dir.file("checkpoints"));
  const std::string path = dir.write("checkpoints/step-1.pt", "one");
  ASSERT_TRUE(update_latest(path).ok());
  EXPECT_EQ(*resolve_checkpoint(path), path);
  EXPECT_EQ(read_file(*resolve_checkpoint(dir.file("checkpoints"))), "one");
  EXPECT_EQ(read_file(*resolve_checkpoint(dir.file(""))), "one");
}

}  // namespace
}  // namespace fullshard
