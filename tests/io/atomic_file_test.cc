#include "fullshard/io/atomic_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "fullshard/io/byte_sink.h"
#include "fullshard/io/crc32.h"
#include "fullshard/tests/io/fault_file_system.h"
#include "fullshard/tests/io/temp_dir.h"
#include "zlib.h"

namespace fullshard {
namespace {

std::string pattern(size_t size) {
  std::string bytes(size, '\0');
  unsigned state = 7;
  for (char& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<char>(state >> 24);
  }
  return bytes;
}

absl::Status save(const std::string& path, const std::string& bytes,
                  FileSystem& file_system) {
  auto file = AtomicFile::create(path, file_system);
  if (!file.ok()) return file.status();
  absl::Status status = (*file)->sink().append(bytes.data(), bytes.size());
  return status.ok() ? (*file)->commit() : status;
}

TEST(Crc32Test, EqualsZlibAtEverySizeAndAlignment) {
  const std::string bytes = pattern(600);
  for (size_t start = 0; start < 17; ++start) {
    for (size_t size = 0; start + size <= bytes.size(); ++size) {
      const auto* data =
          reinterpret_cast<const unsigned char*>(bytes.data()) + start;
      ASSERT_EQ(crc32(12345, data, size), ::crc32_z(12345, data, size));
    }
  }
}

TEST(FileSinkTest, KeepsOrderAcrossSmallAndLargePieces) {
  TempDir dir;
  FaultFileSystem file_system;
  file_system.largest_write = 70001;  // short writes
  const std::string path = dir.file("a");
  const std::string bytes = pattern(5 << 20);
  const int fd = file_system.create(path);
  FileSink sink(fd, path, file_system);
  size_t start = 0;
  for (size_t piece = 1; start < bytes.size(); piece = piece * 3 + 1) {
    const size_t size = std::min(piece, bytes.size() - start);
    ASSERT_TRUE(sink.append(bytes.data() + start, size).ok());
    start += size;
  }
  ASSERT_TRUE(sink.close().ok());
  EXPECT_TRUE(read_file(path) == bytes);
  EXPECT_EQ(sink.append("x", 1).code(), absl::StatusCode::kFailedPrecondition);
}

// Notes how every byte was written.
class DirectFileSystem : public FileSystem {
 public:
  enum class Support { kYes, kShort, kRefusesFlag, kRefusesWrite };
  explicit DirectFileSystem(Support support) : support_(support) {}

  int set_direct(int fd, bool value) override {
    if (value && support_ == Support::kRefusesFlag) return -EINVAL;
    const int result = FileSystem::set_direct(fd, value);
    is_direct_ = value && result >= 0;
    return result;
  }
  ssize_t write(int fd, const void* data, size_t size) override {
    if (!is_direct_) return FileSystem::write(fd, data, size);
    if (support_ == Support::kRefusesWrite) return -EINVAL;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 4096, 0u);
    EXPECT_EQ(size % 4096, 0u);
    EXPECT_EQ(::lseek(fd, 0, SEEK_CUR) % 4096, 0);
    if (support_ == Support::kShort) size = std::min(size, size_t{3 * 4096});
    const ssize_t count = FileSystem::write(fd, data, size);
    if (count > 0) num_direct_bytes += count;
    return count;
  }
  int64_t num_direct_bytes = 0;

 private:
  const Support support_;
  bool is_direct_ = false;
};

class DirectWriteTest
    : public testing::TestWithParam<DirectFileSystem::Support> {};

// Ranges that begin and end anywhere, and a hole, as ranks write one file.
TEST_P(DirectWriteTest, PiecesAnywhereInAFile) {
  TempDir dir;
  DirectFileSystem file_system(GetParam());
  const std::string path = dir.file("a");
  FileSink sink(file_system.create(path), path, file_system);
  const std::string bytes = pattern(21'000'004);
  std::string expected(bytes.size(), '\0');
  const std::pair<size_t, size_t> ranges[] = {{12'000'001, 9'000'003},
                                              {5, 70'000},
                                              {70'005, 1},
                                              {100'000, 6'000'000},
                                              {11'000'000, 65'536}};
  for (const auto& [begin, size] : ranges) {
    ASSERT_TRUE(sink.seek(static_cast<int64_t>(begin)).ok());
    for (size_t at = 0; at < size; at += 999'999) {
      const size_t piece = std::min(size - at, size_t{999'999});
      ASSERT_TRUE(sink.append(bytes.data() + begin + at, piece).ok());
    }
    expected.replace(begin, size, bytes, begin, size);
  }
  ASSERT_TRUE(sink.close().ok());
  const std::string found = read_file(path);
  ASSERT_EQ(found.size(), expected.size());
  EXPECT_TRUE(found == expected);
  const bool refuses = GetParam() == DirectFileSystem::Support::kRefusesFlag ||
                       GetParam() == DirectFileSystem::Support::kRefusesWrite;
  if (refuses) {
    EXPECT_EQ(file_system.num_direct_bytes, 0);
  } else if (file_system.num_direct_bytes == 0) {
    std::printf("the disk of the tests takes no direct writes\n");
  } else {
    const bool is_short = GetParam() == DirectFileSystem::Support::kShort;
    EXPECT_GT(file_system.num_direct_bytes, is_short ? 0 : 10'000'000);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, DirectWriteTest,
    testing::Values(DirectFileSystem::Support::kYes,
                    DirectFileSystem::Support::kShort,
                    DirectFileSystem::Support::kRefusesFlag,
                    DirectFileSystem::Support::kRefusesWrite));

TEST(AtomicFileTest, CommitReplacesTheOldFile) {
  TempDir dir;
  const std::string path = dir.write("a", "old");
  ASSERT_TRUE(save(path, "new", FileSystem::posix()).ok());
  EXPECT_EQ(read_file(path), "new");
  EXPECT_EQ(dir.names(), std::vector<std::string>{"a"});
}

TEST(AtomicFileTest, WithoutCommitNothingChanges) {
  TempDir dir;
  const std::string path = dir.write("a", "old");
  {
    auto file = AtomicFile::create(path);
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE((*file)->sink().append("new", 3).ok());
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(dir.names(), std::vector<std::string>{"a"});
}

TEST(AtomicFileTest, EveryFailingCallLeavesTheOldFile) {
  TempDir dir;
  const std::string path = dir.write("a", "old");
  FaultFileSystem counter;
  ASSERT_TRUE(save(dir.file("b"), "new", counter).ok());
  ASSERT_EQ(counter.num_calls, 5);  // create write sync rename sync_directory
  for (int call = 0; call < 5; ++call) {
    FaultFileSystem file_system;
    file_system.fail_at = call;
    const absl::Status status = save(path, "new", file_system);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_NE(status.message().find(parent_directory(path)), std::string::npos)
        << status;
    // The last step comes after the rename.
    EXPECT_EQ(read_file(path), call < 4 ? "old" : "new");
    EXPECT_EQ(dir.names().size(), 2u) << "call " << call;
  }
}

TEST(AtomicFileTest, BadPathsAreNamed) {
  TempDir dir;
  EXPECT_EQ(AtomicFile::create(dir.file("none/a")).status().code(),
            absl::StatusCode::kNotFound);
  const absl::Status folder = AtomicFile::create(dir.file("")).status();
  EXPECT_EQ(folder.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(folder.message().find(dir.file("")), std::string::npos);
}

TEST(AtomicFileTest, SecondCommitIsAnError) {
  TempDir dir;
  auto file = AtomicFile::create(dir.file("a"));
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->commit().ok());
  EXPECT_EQ((*file)->commit().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ReplaceSymlinkTest, ReplacesFileAndLink) {
  TempDir dir;
  dir.write("a", "one");
  dir.write("b", "two");
  const std::string link = dir.write("latest", "three");
  ASSERT_TRUE(replace_symlink("a", link).ok());
  EXPECT_EQ(read_file(link), "one");
  ASSERT_TRUE(replace_symlink("b", link).ok());
  EXPECT_EQ(read_file(link), "two");
  EXPECT_EQ(dir.names().size(), 3u);
}

}  // namespace
}  // namespace fullshard
