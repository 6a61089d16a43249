#include "fullshard/data/idx_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

namespace fullshard {
namespace {

using testing::HasSubstr;

std::string gzip(const std::string& bytes) {
  z_stream stream = {};
  EXPECT_EQ(deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, 16 + MAX_WBITS, 8,
                         Z_DEFAULT_STRATEGY),
            Z_OK);
  std::string out(deflateBound(&stream, bytes.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

// Two by three bytes, 1 to 6.
std::string small_file() {
  return std::string("\0\0\x08\x02\0\0\0\x02\0\0\0\x03\x01\x02\x03\x04\x05\x06",
                     18);
}

void expect_data_loss(const std::string& gzipped, const std::string& message) {
  const absl::Status status = read_idx_gz(gzipped, "the file").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the file"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

TEST(IdxFileTest, ReadsShapeAndBytes) {
  const at::Tensor values = *read_idx_gz(gzip(small_file()), "the file");
  EXPECT_EQ(values.sizes(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(values.scalar_type(), at::kByte);
  EXPECT_EQ(values[1][2].item<int64_t>(), 6);
}

TEST(IdxFileTest, RefusesWhatIsNotGzip) {
  expect_data_loss("", "not a whole gzip file");
  expect_data_loss(small_file(), "not a whole gzip file");
}

TEST(IdxFileTest, RefusesEveryTruncation) {
  const std::string whole = gzip(small_file());
  for (size_t size = 0; size < whole.size(); ++size) {
    expect_data_loss(whole.substr(0, size), "not a whole gzip file");
  }
}

TEST(IdxFileTest, RefusesFlippedBits) {
  std::string damaged = gzip(small_file());
  damaged[damaged.size() - 6] ^= 1;  // In the checksum.
  expect_data_loss(damaged, "not a whole gzip file");
}

TEST(IdxFileTest, RefusesOtherTypesAndShortHeaders) {
  std::string floats = small_file();
  floats[2] = 0x0D;
  expect_data_loss(gzip(floats), "not an IDX file of bytes");
  expect_data_loss(gzip(small_file().substr(0, 10)), "truncated header");
}

TEST(IdxFileTest, RefusesSizesThatDoNotFitTheData) {
  expect_data_loss(gzip(small_file().substr(0, 17)),
                   "expected 6 bytes of data, got 5");
  expect_data_loss(gzip(small_file() + "x"), "expected 6 bytes of data, got 7");
}

TEST(IdxFileTest, RefusesSizesThatOverflow) {
  std::string huge("\0\0\x08\x03", 4);
  huge += std::string(12, '\xff');
  expect_data_loss(gzip(huge), "larger than a gigabyte");
}

}  // namespace
}  // namespace fullshard
