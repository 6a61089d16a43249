#include "fullshard/data/idx_file.h"

#include <zlib.h>

#include <cstring>
#include <vector>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"

namespace fullshard {
namespace {

// No data set of this project is larger; a file that claims to be is refused.
constexpr size_t kMaxBytes = size_t{1} << 30;

absl::Status data_loss(const std::string& name, absl::string_view what) {
  return absl::DataLossError(absl::StrCat(name, ": ", what));
}

absl::StatusOr<std::string> gunzip(absl::string_view gzipped,
                                   const std::string& name) {
  z_stream stream = {};
  if (inflateInit2(&stream, 16 + MAX_WBITS) != Z_OK) {
    return data_loss(name, "zlib does not start");
  }
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(gzipped.data()));
  stream.avail_in = static_cast<uInt>(gzipped.size());
  std::string out;
  std::vector<char> buffer(1 << 16);
  int result = Z_OK;
  while (result == Z_OK && out.size() < kMaxBytes) {
    stream.next_out = reinterpret_cast<Bytef*>(buffer.data());
    stream.avail_out = static_cast<uInt>(buffer.size());
    result = inflate(&stream, Z_NO_FLUSH);
    out.append(buffer.data(), buffer.size() - stream.avail_out);
  }
  inflateEnd(&stream);
  if (result != Z_STREAM_END) {
    return data_loss(name, "not a whole gzip file");
  }
  return out;
}

uint32_t big_endian(const char* bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    value = value << 8 | static_cast<unsigned char>(bytes[i]);
  }
  return value;
}

}  // namespace

absl::StatusOr<at::Tensor> read_idx_gz(absl::string_view gzipped,
                                       const std::string& name) {
  FS_ASSIGN_OR_RETURN(const std::string file, gunzip(gzipped, name));
  // Two zero bytes, the type (8: unsigned byte), the number of dimensions.
  if (file.size() < 4 || file[0] != 0 || file[1] != 0 || file[2] != 8 ||
      file[3] < 1 || file[3] > 4) {
    return data_loss(name, "not an IDX file of bytes");
  }
  const size_t num_dims = static_cast<size_t>(file[3]);
  const size_t header = 4 + 4 * num_dims;
  if (file.size() < header) return data_loss(name, "truncated header");
  std::vector<int64_t> sizes;
  size_t numel = 1;
  for (size_t i = 0; i < num_dims; ++i) {
    sizes.push_back(big_endian(file.data() + 4 + 4 * i));
    numel *= static_cast<size_t>(sizes.back());
    if (numel > kMaxBytes) return data_loss(name, "larger than a gigabyte");
  }
  if (file.size() - header != numel) {
    return data_loss(name,
                     absl::StrCat("expected ", numel, " bytes of data, got ",
                                  file.size() - header));
  }
  at::Tensor values = at::empty(sizes, at::kByte);
  std::memcpy(values.data_ptr(), file.data() + header, numel);
  return values;
}

}  // namespace fullshard
