// Every writer, interrupted at each of its system calls: afterwards the old
// checkpoint or the new one loads, and nothing else is left by a writer that
// lived on.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <ostream>
#include <string>

#include "fullshard/io/checkpoint_reader.h"
#include "fullshard/io/full_state_dict.h"
#include "fullshard/io/pt_writer.h"
#include "fullshard/io/read_elements.h"
#include "fullshard/io/safetensors.h"
#include "fullshard/io/sharded_checkpoint_writer.h"
#include "fullshard/tests/io/fault_file_system.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"

namespace fullshard {
namespace {

constexpr int64_t kNumel = 1'200'000;  // more than a sink's buffer

at::Tensor tensor_of(unsigned version) {
  return make_tensor(c10::ScalarType::Float, {kNumel}, version);
}

absl::Status save_pt(const std::string& path, unsigned version,
                     FileSystem& file_system) {
  PtWriterOptions options;
  options.file_system = &file_system;
  auto writer = PtWriter::create(path, options);
  if (!writer.ok()) return writer.status();
  absl::Status status = (*writer)->tensor("m.a", tensor_of(version));
  return status.ok() ? (*writer)->commit() : status;
}

absl::Status save_full(const std::string& path, unsigned version,
                       FileSystem& file_system) {
  FullStateDictOptions options;
  options.module_keys = {"m"};
  options.names = {"m.a"};
  options.file_system = &file_system;
  auto writer = FullStateDictWriter::create(path, options);
  if (!writer.ok()) return writer.status();
  absl::Status status = (*writer)->add("m.a", tensor_of(version));
  return status.ok() ? (*writer)->commit() : status;
}

std::vector<SafetensorsTensor> announced() {
  return {describe_safetensors("a", c10::ScalarType::Float, {kNumel}).value(),
          describe_safetensors("b", c10::ScalarType::Float, {1}).value()};
}

template <class Writer>
absl::Status save_both(absl::StatusOr<std::unique_ptr<Writer>> writer,
                       unsigned version) {
  if (!writer.ok()) return writer.status();
  absl::Status status = (*writer)->tensor("a", tensor_of(version));
  if (status.ok()) {
    status = (*writer)->tensor("b", tensor_of(version).narrow(0, 0, 1));
  }
  return status.ok() ? (*writer)->commit() : status;
}

absl::Status save_safetensors(const std::string& path, unsigned version,
                              FileSystem& file_system) {
  return save_both(
      SafetensorsWriter::create(path, announced(), {{}, &file_system}),
      version);
}

absl::Status save_folder(const std::string& path, unsigned version,
                         FileSystem& file_system) {
  SafetensorsFolderOptions options;
  options.max_shard_bytes = kNumel * 4;
  options.file_system = &file_system;
  return save_both(SafetensorsFolderWriter::create(path, announced(), options),
                   version);
}

absl::Status save_sharded(const std::string& path, unsigned version,
                          FileSystem& file_system) {
  const absl::Status status =
      ShardedCheckpointWriter::prepare(path, file_system);
  if (!status.ok()) return status;
  ShardToSave shard;
  shard.path = {"a"};
  shard.sizes = {kNumel};
  shard.order = {0};
  shard.values = tensor_of(version);
  return ShardedCheckpointWriter(path, 0, 1, std::chrono::seconds(10),
                                 file_system)
      .write({shard}, {});
}

struct Writer {
  const char* name;
  std::function<absl::Status(const std::string&, unsigned, FileSystem&)> save;
  bool replaces;  // else its path has to be free
};
void PrintTo(const Writer& writer, std::ostream* out) { *out << writer.name; }

// The version that `path` holds; 0: nothing is there.
unsigned version_at(const std::string& path) {
  const auto reader = open_checkpoint(path);
  if (absl::IsNotFound(reader.status())) return 0;
  EXPECT_TRUE(reader.ok()) << reader.status();
  const at::Tensor found = (*reader)->tensor(0).value();
  for (const unsigned version : {1u, 2u}) {
    if (bit_equal(found, tensor_of(version))) return version;
  }
  ADD_FAILURE() << path << " holds neither version";
  return 0;
}

class WriterFaultsTest : public testing::TestWithParam<Writer> {
 protected:
  // The path that is written, with version 1 at it where writers replace.
  std::string prepare(const TempDir& dir) const {
    const std::string path = dir.file("checkpoint");
    if (GetParam().replaces) {
      EXPECT_TRUE(GetParam().save(path, 1, FileSystem::posix()).ok());
    }
    return path;
  }
  unsigned old_version() const { return GetParam().replaces ? 1 : 0; }
};

TEST_P(WriterFaultsTest, EveryFailingCallIsNamedAndLosesNothing) {
  TempDir counting;
  FaultFileSystem counter;
  ASSERT_TRUE(GetParam().save(counting.file("a"), 2, counter).ok());
  for (const int error : {ENOSPC, EIO, EACCES, EROFS}) {
    for (int call = 0; call < counter.num_calls; ++call) {
      TempDir dir;
      const std::string path = prepare(dir);
      FaultFileSystem file_system;
      file_system.fail_at = call;
      file_system.error = error;
      const absl::Status status = GetParam().save(path, 2, file_system);
      EXPECT_FALSE(status.ok()) << call;
      EXPECT_NE(status.message().find(parent_directory(path)),
                std::string::npos)
          << status;
      // Only syncing the folder comes after the rename.
      const bool is_last = call == counter.num_calls - 1;
      EXPECT_EQ(version_at(path), is_last ? 2u : old_version()) << call;
      EXPECT_EQ(dir.names().size(), is_last ? 1u : old_version()) << call;
    }
  }
}

TEST_P(WriterFaultsTest, KilledAtEveryCallOldOrNewLoads) {
  FaultFileSystem counter;
  TempDir counting;
  ASSERT_TRUE(GetParam().save(counting.file("a"), 2, counter).ok());
  for (int call = 0; call < counter.num_calls; ++call) {
    TempDir dir;
    const std::string path = prepare(dir);
    const pid_t child = ::fork();
    if (child == 0) {
      FaultFileSystem file_system;
      file_system.fail_at = call;
      file_system.fault = FaultFileSystem::Fault::kKill;
      (void)GetParam().save(path, 2, file_system);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << call;
    const bool is_last = call == counter.num_calls - 1;
    EXPECT_EQ(version_at(path), is_last ? 2u : old_version()) << call;
    // The next save works, whatever the killed one left.
    if (version_at(path) == old_version()) {
      EXPECT_TRUE(GetParam().save(path, 2, FileSystem::posix()).ok());
      EXPECT_EQ(version_at(path), 2u);
    }
  }
}

TEST_P(WriterFaultsTest, ShortWritesAreContinued) {
  TempDir dir;
  const std::string path = prepare(dir);
  FaultFileSystem file_system;
  file_system.largest_write = 4093;
  ASSERT_TRUE(GetParam().save(path, 2, file_system).ok());
  EXPECT_GT(file_system.num_calls, 300);
  EXPECT_EQ(version_at(path), 2u);
}

TEST_P(WriterFaultsTest, InterruptedWritesAreRepeated) {
  class Interrupted : public FileSystem {
   public:
    ssize_t write(int fd, const void* data, size_t size) override {
      return ++num_calls_ % 2 == 1 ? -EINTR : FileSystem::write(fd, data, size);
    }
    int num_calls_ = 0;
  } file_system;
  TempDir dir;
  ASSERT_TRUE(GetParam().save(prepare(dir), 2, file_system).ok());
  EXPECT_EQ(version_at(dir.file("checkpoint")), 2u);
}

TEST_P(WriterFaultsTest, WritesOfNothingAreAnErrorNotAHang) {
  class Stuck : public FileSystem {
   public:
    ssize_t write(int, const void*, size_t) override { return 0; }
  } file_system;
  TempDir dir;
  const std::string path = prepare(dir);
  EXPECT_FALSE(GetParam().save(path, 2, file_system).ok());
  EXPECT_EQ(version_at(path), old_version());
}

// The kernel itself refuses, as on a full disk: no file may pass 1 MiB.
TEST_P(WriterFaultsTest, RealLimitOfTheSystem) {
  TempDir dir;
  const std::string path = prepare(dir);
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const absl::Status status = GetParam().save(path, 2, FileSystem::posix());
    ::_exit(status.ok() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(version_at(path), old_version());
  EXPECT_EQ(dir.names().size(), old_version());
}

INSTANTIATE_TEST_SUITE_P(
    Writers, WriterFaultsTest,
    testing::Values(Writer{"Pt", &save_pt, true},
                    Writer{"FullStateDict", &save_full, true},
                    Writer{"Safetensors", &save_safetensors, true},
                    Writer{"SafetensorsFolder", &save_folder, false}),
    [](const auto& info) { return info.param.name; });

TEST(ReaderFaultsTest, FilesCutShortUnderAReaderAreNamed) {
  TempDir dir;
  ASSERT_TRUE(save_pt(dir.file("a.pt"), 1, FileSystem::posix()).ok());
  ASSERT_TRUE(
      save_safetensors(dir.file("a.safetensors"), 1, FileSystem::posix()).ok());
  for (const char* name : {"a.pt", "a.safetensors"}) {
    const auto reader = open_checkpoint(dir.file(name)).value();
    std::filesystem::resize_file(dir.file(name), 5000);
    const absl::Status status = reader->tensor(0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_NE(status.message().find("was cut short while it was read"),
              std::string::npos)
        << status;
  }
}

// Reads through `file_system` for as long as it lives.
class ReadThrough {
 public:
  explicit ReadThrough(FileSystem& file_system) {
    FileSystem::set_for_readers(&file_system);
  }
  ~ReadThrough() { FileSystem::set_for_readers(nullptr); }
};

// Opens a checkpoint of whatever format and reads its first tensor.
absl::StatusOr<at::Tensor> read_first(const std::string& path) {
  auto reader = open_checkpoint(path);
  if (!reader.ok()) return reader.status();
  auto tensor = (*reader)->tensor(0);
  if (!tensor.ok()) return tensor;
  const at::Tensor out = at::empty({tensor->numel()}, tensor->options());
  const absl::Status status = read_elements(*tensor, {0}, 0, out);
  if (!status.ok()) return status;
  return out;
}

TEST(ReaderFaultsTest, EveryFailingCallOfEveryReaderIsNamed) {
  TempDir dir;
  FileSystem& posix = FileSystem::posix();
  ASSERT_TRUE(save_pt(dir.file("a.pt"), 1, posix).ok());
  ASSERT_TRUE(save_safetensors(dir.file("a.safetensors"), 1, posix).ok());
  ASSERT_TRUE(save_folder(dir.file("folder"), 1, posix).ok());
  ASSERT_TRUE(save_sharded(dir.file("step-000001"), 1, posix).ok());
  for (const char* name : {"a.pt", "a.safetensors", "folder", "step-000001"}) {
    const std::string path = dir.file(name);
    FaultFileSystem counter;
    counter.largest_read = 100'001;  // Of 1.6 MB.
    {
      ReadThrough through(counter);
      const auto tensor = read_first(path);
      ASSERT_TRUE(tensor.ok()) << tensor.status();
      EXPECT_TRUE(bit_equal(*tensor, tensor_of(1))) << name;
    }
    EXPECT_GT(counter.num_calls, 10) << name;
    for (const int error : {EIO, EACCES, ENOMEM}) {
      for (int call = 0; call < counter.num_calls; ++call) {
        FaultFileSystem file_system;
        file_system.largest_read = counter.largest_read;
        file_system.fail_at = call;
        file_system.error = error;
        ReadThrough through(file_system);
        const absl::Status status = read_first(path).status();
        EXPECT_NE(status.message().find(path), std::string::npos)
            << call << status;
        EXPECT_NE(status.message().find(std::strerror(error)),
                  std::string::npos)
            << call << status;
      }
    }
  }
}

// A file that is replaced, as our writers do, stays whole for its readers.
TEST(ReaderFaultsTest, FilesReplacedUnderAReaderStayWhole) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  ASSERT_TRUE(save_pt(path, 1, FileSystem::posix()).ok());
  const auto reader = open_checkpoint(path).value();
  ASSERT_TRUE(save_pt(path, 2, FileSystem::posix()).ok());
  EXPECT_TRUE(bit_equal(*reader->tensor(0), tensor_of(1)));
}

}  // namespace
}  // namespace fullshard
