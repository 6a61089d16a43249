#include "fullshard/io/sharded_checkpoint_reader.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "c10/core/GradMode.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
#include "fullshard/io/crc32.h"
#include "fullshard/io/dcp_reader.h"

namespace fullshard {
namespace {

namespace fs = std::filesystem;

using Piece = ShardedManifest::Piece;
using Tensor = ShardedManifest::Tensor;

constexpr int64_t kBlock = ShardedManifest::kBlockBytes;

int64_t element_bytes(const Tensor& tensor) {
  return static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

absl::Status incomplete(const std::string& folder, absl::string_view why) {
  return absl::DataLossError(
      absl::StrCat(folder, ": incomplete checkpoint: ", why));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardedCheckpointReader>>
ShardedCheckpointReader::open(const std::string& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": expected the folder of a sharded checkpoint"));
  }
  const std::string path = absl::StrCat(folder, "/", kManifestName);
  std::unique_ptr<ShardedCheckpointReader> reader(
      new ShardedCheckpointReader(folder));
  if (fs::exists(path, ignored)) {
    FS_ASSIGN_OR_RETURN(const std::shared_ptr<MappedFile> text,
                        MappedFile::open(path));
    absl::StatusOr<ShardedManifest> manifest =
        ShardedManifest::parse(text->bytes());
    FS_RETURN_IF_ERROR(annotate(manifest.status(), path));
    reader->manifest_ = std::move(manifest).value();
  } else if (fs::exists(folder + "/.metadata", ignored)) {
    FS_ASSIGN_OR_RETURN(reader->manifest_, read_dcp_metadata(folder));
    reader->is_of_python_ = true;
  } else {
    return incomplete(folder, absl::StrCat(kManifestName, " is missing"));
  }
  FS_RETURN_IF_ERROR(reader->open_files());
  if (const absl::Status status = reader->manifest_.check_complete();
      !status.ok()) {
    return incomplete(folder, status.message());
  }
  const auto& tensors = reader->manifest_.tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    bool is_new = reader->by_name_.emplace(tensors[i].name(), i).second;
    for (const auto& alias : tensors[i].aliases) {
      is_new = reader->by_name_.emplace(flat_name(alias), i).second && is_new;
    }
    if (!is_new) {
      return absl::DataLossError(absl::StrCat(
          path, ": the name '", tensors[i].name(), "' appears twice"));
    }
  }
  return reader;
}

absl::Status ShardedCheckpointReader::open_files() {
  for (const ShardedManifest::File& file : manifest_.files) {
    const std::string path = absl::StrCat(folder_, "/", file.name);
    std::error_code error;
    const auto size = static_cast<int64_t>(fs::file_size(path, error));
    if (error)
      return incomplete(folder_, absl::StrCat(file.name, " is missing"));
    if (size != file.num_bytes) {
      return incomplete(
          folder_, absl::StrCat(file.name, " has ", size, " bytes, expected ",
                                file.num_bytes));
    }
    std::shared_ptr<MappedFile> mapped;
    if (size > 0) {
      FS_ASSIGN_OR_RETURN(mapped, MappedFile::open(path));
    }
    files_.push_back(std::move(mapped));
  }
  return absl::OkStatus();
}

const Tensor* ShardedCheckpointReader::find(absl::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  return found == by_name_.end() ? nullptr : &manifest_.tensors[found->second];
}

// Copies bytes [begin, end) of a piece to `out`; checks every block that they
// are in.
absl::Status ShardedCheckpointReader::read_piece(const Tensor& tensor,
                                                 const Piece& piece,
                                                 int64_t begin, int64_t end,
                                                 char* out) const {
  const MappedFile& file = *files_[static_cast<size_t>(piece.file)];
  if (is_of_python_) {
    return file.read(static_cast<size_t>(piece.data_offset + begin),
                     static_cast<size_t>(end - begin), out);
  }
  const int64_t num_bytes = piece.numel * element_bytes(tensor);
  std::vector<char> partial;
  for (int64_t block = begin / kBlock; block * kBlock < end; ++block) {
    const int64_t from = block * kBlock;
    const int64_t size = std::min(kBlock, num_bytes - from);
    const int64_t first = std::max(begin, from);
    const int64_t last = std::min(end, from + size);
    char* const wanted = out + (first - begin);
    const bool whole = last - first == size;
    if (!whole) partial.resize(static_cast<size_t>(size));
    char* const bytes = whole ? wanted : partial.data();
    FS_RETURN_IF_ERROR(file.read(static_cast<size_t>(piece.data_offset + from),
                                 static_cast<size_t>(size), bytes));
    if (crc32(0, bytes, static_cast<size_t>(size)) !=
        piece.crc32[static_cast<size_t>(block)]) {
      return bad_checksum(tensor, piece, from, from + size);
    }
    if (whole) continue;
    std::memcpy(wanted, bytes + (first - from),
                static_cast<size_t>(last - first));
  }
  return absl::OkStatus();
}

absl::Status ShardedCheckpointReader::bad_checksum(const Tensor& tensor,
                                                   const Piece& piece,
                                                   int64_t begin,
                                                   int64_t end) const {
  return absl::DataLossError(absl::StrCat(
      folder_, "/", manifest_.files[static_cast<size_t>(piece.file)].name,
      ": bad checksum in '", tensor.name(), "', bytes ",
      piece.data_offset + begin, " to ", piece.data_offset + end));
}

absl::Status ShardedCheckpointReader::read_same_order(const Tensor& tensor,
                                                      int64_t begin,
                                                      int64_t numel,
                                                      char* out) const {
  const int64_t element = element_bytes(tensor);
  const auto& pieces = tensor.pieces;
  auto piece = std::upper_bound(
      pieces.begin(), pieces.end(), begin,
      [](int64_t at, const Piece& p) { return at < p.begin + p.numel; });
  const int64_t end = begin + numel;
  for (int64_t at = begin; at < end; ++piece) {
    const int64_t last = std::min(end, piece->begin + piece->numel);
    const int64_t from = (at - piece->begin) * element;
    const int64_t to = (last - piece->begin) * element;
    FS_RETURN_IF_ERROR(read_piece(tensor, *piece, from, to, out));
    out += to - from;
    at = last;
  }
  return absl::OkStatus();
}

absl::Status ShardedCheckpointReader::read(const Tensor& tensor,
                                           const std::vector<int64_t>& order,
                                           int64_t begin,
                                           at::Tensor out) const {
  at::NoGradGuard no_grad;
  if (begin < 0 || out.numel() > tensor.numel() - begin) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", tensor.name(), "': elements ", begin, " to ",
                     begin + out.numel(), " of ", tensor.numel()));
  }
  if (order != tensor.order) {
    FS_ASSIGN_OR_RETURN(const at::Tensor whole, this->tensor(tensor));
    const at::Tensor reordered = whole.permute(order).contiguous().view({-1});
    out.copy_(reordered.narrow(0, begin, out.numel()));
    return absl::OkStatus();
  }
  if (out.scalar_type() == tensor.dtype) {
    return read_same_order(tensor, begin, out.numel(),
                           static_cast<char*>(out.mutable_data_ptr()));
  }
  const at::Tensor stored = at::empty(out.sizes(), tensor.dtype);
  FS_RETURN_IF_ERROR(
      read_same_order(tensor, begin, out.numel(),
                      static_cast<char*>(stored.mutable_data_ptr())));
  out.copy_(stored);
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> ShardedCheckpointReader::tensor(
    const Tensor& tensor) const {
  const at::Tensor values = at::empty({tensor.numel()}, tensor.dtype);
  FS_RETURN_IF_ERROR(
      read_same_order(tensor, 0, tensor.numel(),
                      static_cast<char*>(values.mutable_data_ptr())));
  return values.as_strided(tensor.sizes,
                           strides_of(tensor.sizes, tensor.order));
}

absl::Status ShardedCheckpointReader::verify() const {
  std::vector<char> block(static_cast<size_t>(kBlock));
  for (const Tensor& tensor : manifest_.tensors) {
    for (const Piece& piece : tensor.pieces) {
      const int64_t num_bytes = piece.numel * element_bytes(tensor);
      for (int64_t at = 0; at < num_bytes; at += kBlock) {
        FS_RETURN_IF_ERROR(read_piece(
            tensor, piece, at, std::min(at + kBlock, num_bytes), block.data()));
      }
    }
  }
  return absl::OkStatus();
}

std::string step_folder_name(int64_t step) {
  return absl::StrFormat("step-%06d", step);
}

std::vector<std::string> list_step_folders(const std::string& folder) {
  std::vector<std::pair<int64_t, std::string>> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string file_name = entry.path().filename().string();
    absl::string_view name = file_name;
    // Set aside, and its replacement never came.
    const bool replaced = absl::ConsumePrefix(&name, ".") &&
                          absl::ConsumeSuffix(&name, ".replaced");
    if (replaced && fs::exists(fs::path(folder) / std::string(name), ignored)) {
      continue;
    }
    int64_t step = 0;
    if (!absl::ConsumePrefix(&name, "step-") ||
        !absl::SimpleAtoi(name, &step) || !entry.is_directory(ignored)) {
      continue;
    }
    found.emplace_back(step, entry.path().string());
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> folders;
  for (auto& [step, path] : found) folders.push_back(std::move(path));
  return folders;
}

LatestCheckpoint find_latest_checkpoint(const std::string& folder) {
  LatestCheckpoint latest;
  for (const std::string& path : list_step_folders(folder)) {
    const auto reader = ShardedCheckpointReader::open(path);
    const absl::Status status =
        reader.ok() && (*reader)->is_of_python()
            ? incomplete(path, absl::StrCat(kManifestName, " is missing"))
            : reader.status();
    if (status.ok()) {
      latest.path = path;
      break;
    }
    latest.skipped.emplace_back(status.message());
  }
  return latest;
}

}  // namespace fullshard
