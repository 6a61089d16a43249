#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "fullshard/io/mapped_file.h"
#include "fullshard/io/zip_reader.h"
#include "fullshard/io/zip_writer.h"
#include "fullshard/tests/io/temp_dir.h"

namespace fullshard {
namespace {

class StringSink : public ByteSink {
 public:
  absl::Status append(const void* data, size_t size) override {
    bytes.append(static_cast<const char*>(data), size);
    return absl::OkStatus();
  }
  absl::Status seek(int64_t) override {
    return absl::UnimplementedError("no seek");
  }
  absl::Status close() override { return absl::OkStatus(); }

  std::string bytes;
};

std::string make_archive(uint64_t zip64_limit, int num_entries = 3) {
  StringSink sink;
  ZipWriter writer(sink, zip64_limit);
  for (int i = 0; i < num_entries; ++i) {
    const std::string name = absl::StrCat("archive/data/", i);
    EXPECT_TRUE(
        writer.add(name, std::string(static_cast<size_t>(i * 37), 'x')).ok());
  }
  EXPECT_TRUE(writer.finish().ok());
  EXPECT_EQ(static_cast<size_t>(writer.num_bytes()), sink.bytes.size());
  return sink.bytes;
}

void expect_archive(const std::string& bytes, int num_entries = 3) {
  const absl::StatusOr<ZipReader> reader = ZipReader::open(bytes);
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ(reader->entries().size(), static_cast<size_t>(num_entries));
  for (int i = 0; i < num_entries; ++i) {
    const auto* entry = reader->find(absl::StrCat("archive/data/", i));
    ASSERT_NE(entry, nullptr);
    const absl::StatusOr<absl::string_view> data = reader->data(*entry);
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ(*data, std::string(static_cast<size_t>(i * 37), 'x'));
    EXPECT_EQ((data->data() - bytes.data()) % 64, 0);
    EXPECT_TRUE(reader->verify(*entry).ok());
  }
}

TEST(ZipTest, RoundTrip) { expect_archive(make_archive(0xffffffff)); }

TEST(ZipTest, RoundTripWithZip64Records) {
  for (const uint64_t limit : {0, 1, 38, 100, 200}) {
    expect_archive(make_archive(limit));
  }
}

TEST(ZipTest, MoreThan65535Entries) {
  StringSink sink;
  ZipWriter writer(sink);
  for (int i = 0; i < 70000; ++i) {
    ASSERT_TRUE(writer.add(absl::StrCat(i), "").ok());
  }
  ASSERT_TRUE(writer.finish().ok());
  const absl::StatusOr<ZipReader> reader = ZipReader::open(sink.bytes);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->entries().size(), 70000u);
}

TEST(ZipTest, NoEntries) { expect_archive(make_archive(0xffffffff, 0), 0); }

TEST(ZipTest, EveryTruncationIsAnError) {
  for (const uint64_t limit : {0, 0x7fffffff}) {
    const std::string bytes = make_archive(limit);
    for (size_t size = 0; size < bytes.size(); ++size) {
      // A copy of the exact size lets memory checkers see reads beyond it.
      const std::string cut = bytes.substr(0, size);
      ASSERT_FALSE(ZipReader::open(cut).ok()) << size;
    }
  }
}

TEST(ZipTest, RandomFlipsNeverReadOutOfBounds) {
  std::mt19937 random(1);
  for (const uint64_t limit : {0, 0x7fffffff}) {
    const std::string bytes = make_archive(limit);
    for (int trial = 0; trial < 20000; ++trial) {
      std::string damaged = bytes;
      for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
        damaged[random() % damaged.size()] = static_cast<char>(random());
      }
      const absl::StatusOr<ZipReader> reader = ZipReader::open(damaged);
      if (!reader.ok()) continue;
      for (const ZipReader::Entry& entry : reader->entries()) {
        (void)reader->verify(entry);
      }
    }
  }
}

TEST(ZipTest, DamagedDataFailsItsChecksum) {
  std::string bytes = make_archive(0xffffffff);
  bytes[bytes.find("xxx")] = 'y';
  const absl::StatusOr<ZipReader> reader = ZipReader::open(bytes);
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ(reader->verify(reader->entries()[1]).code(),
            absl::StatusCode::kDataLoss);
}

TEST(ZipTest, EqualNamesAreRefused) {
  StringSink sink;
  ZipWriter writer(sink);
  ASSERT_TRUE(writer.add("a", "1").ok());
  ASSERT_TRUE(writer.add("a", "2").ok());
  ASSERT_TRUE(writer.finish().ok());
  const absl::Status status = ZipReader::open(sink.bytes).status();
  EXPECT_NE(status.message().find("two entries named \"a\""),
            std::string::npos);
}

// Leaves a hole where a whole piece is written: the test's data are zeros.
class SparseSink : public ByteSink {
 public:
  explicit SparseSink(int fd) : fd_(fd) {}
  absl::Status append(const void* data, size_t size) override {
    const bool is_hole = size >= ZipWriter::kPieceBytes;
    const bool ok =
        is_hole ? ::lseek(fd_, static_cast<off_t>(size), SEEK_CUR) >= 0
                : ::write(fd_, data, size) == static_cast<ssize_t>(size);
    return ok ? absl::OkStatus() : absl::InternalError("sparse write");
  }
  absl::Status seek(int64_t) override {
    return absl::UnimplementedError("no seek");
  }
  absl::Status close() override { return absl::OkStatus(); }

 private:
  int fd_;
};

TEST(ZipTest, EntryOverFourGigabytes) {
  constexpr size_t kSize = (size_t{4} << 30) + (size_t{1} << 20);
  TempDir dir;
  const std::string path = dir.file("large");
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  void* zeros = ::mmap(nullptr, kSize, PROT_READ,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(zeros, MAP_FAILED);
  (void)::madvise(zeros, kSize, MADV_HUGEPAGE);
  SparseSink sink(fd);
  ZipWriter writer(sink);
  ASSERT_TRUE(writer.add("large", zeros, kSize).ok());
  ASSERT_TRUE(writer.add("after", "the end").ok());
  ASSERT_TRUE(writer.finish().ok());
  ::close(fd);
  ::munmap(zeros, kSize);

  const auto file = MappedFile::open(path);
  ASSERT_TRUE(file.ok());
  const absl::StatusOr<ZipReader> reader = ZipReader::open((*file)->bytes());
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->data(*reader->find("large"))->size(), kSize);
  EXPECT_EQ(*reader->data(*reader->find("after")), "the end");
}

}  // namespace
}  // namespace fullshard
