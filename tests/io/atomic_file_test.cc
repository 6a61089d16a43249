#include "fullshard/io/atomic_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

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
