#include "fullshard/io/sharded_checkpoint_writer.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "fullshard/core/catch_errors.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
#include "fullshard/io/atomic_file.h"
#include "fullshard/io/dcp_metadata.h"
#include "fullshard/io/dtype_names.h"
#include "fullshard/io/mapped_storage.h"
#include "fullshard/io/pickle_writer.h"
#include "fullshard/io/zip_writer.h"

namespace fullshard {
namespace {

namespace fs = std::filesystem;

constexpr char kDcpMetadata[] = ".metadata";

std::string data_file_name(int rank) {
  return absl::StrCat("__", rank, "_0.distcp");
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

absl::StatusOr<std::string> read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.good() && !file.eof()) {
    return absl::UnavailableError(absl::StrCat("cannot read ", path));
  }
  return text;
}

absl::Status write_text(const std::string& path, absl::string_view text,
                        FileSystem& file_system) {
  FS_ASSIGN_OR_RETURN(const std::unique_ptr<AtomicFile> file,
                      AtomicFile::create(path, file_system));
  FS_RETURN_IF_ERROR(file->sink().append(text.data(), text.size()));
  return file->commit();
}

// `.<name>.<what>` beside `folder`.
std::string beside(const std::string& folder, const char* what) {
  return absl::StrCat(parent_directory(folder), "/.", base_name(folder), ".",
                      what);
}

// The bytes of tensors as one rank's data file holds them.
class DataFile {
 public:
  static absl::StatusOr<std::unique_ptr<DataFile>> create(
      const std::string& path, FileSystem& file_system) {
    const int fd = file_system.create(path);
    if (fd < 0) return file_error(fd, "create", path);
    return std::unique_ptr<DataFile>(new DataFile(fd, path, file_system));
  }

  // Writes one box as torch.save would, starting on a boundary of 64 bytes.
  absl::StatusOr<ShardedManifest::Piece> add(const TensorBox& box,
                                             const std::vector<int64_t>& order,
                                             const at::Tensor& values) {
    FS_RETURN_IF_ERROR(pad());
    ShardedManifest::Piece piece;
    piece.begin = box.begin;
    piece.numel = box.numel;
    piece.item_offset = position_;
    const void* const data = values.const_data_ptr();
    const auto num_bytes = static_cast<int64_t>(values.nbytes());
    PickledTensor tensor;
    tensor.dtype = values.scalar_type();
    tensor.storage_key = "0";
    tensor.storage_bytes = num_bytes;
    tensor.sizes = box.sizes;
    tensor.strides = strides_of(box.sizes, order);
    PickleWriter pickle;
    pickle.tensor(tensor);
    ZipWriter zip(sink_);
    FS_RETURN_IF_ERROR(zip.add("archive/data.pkl", pickle.finish()));
    FS_RETURN_IF_ERROR(zip.add("archive/byteorder", "little"));
    static_assert(ShardedManifest::kBlockBytes == ZipWriter::kPieceBytes);
    std::vector<uint32_t> block_crcs;
    FS_RETURN_IF_ERROR(zip.add("archive/data/0", data,
                               static_cast<size_t>(num_bytes), &block_crcs));
    piece.crc32.assign(block_crcs.begin(), block_crcs.end());
    piece.data_offset = position_ + zip.last_data_offset();
    FS_RETURN_IF_ERROR(zip.add("archive/version", "3\n"));
    FS_RETURN_IF_ERROR(zip.finish());
    piece.item_bytes = zip.num_bytes();
    position_ += piece.item_bytes;
    return piece;
  }

  // Writes a value as torch.save would; returns where it begins.
  absl::StatusOr<int64_t> add_object(const std::string& pickle) {
    FS_RETURN_IF_ERROR(pad());
    const int64_t begin = position_;
    ZipWriter zip(sink_);
    FS_RETURN_IF_ERROR(zip.add("archive/data.pkl", pickle));
    FS_RETURN_IF_ERROR(zip.add("archive/byteorder", "little"));
    FS_RETURN_IF_ERROR(zip.add("archive/version", "3\n"));
    FS_RETURN_IF_ERROR(zip.finish());
    position_ += zip.num_bytes();
    return begin;
  }

  absl::Status close() { return sink_.close(); }
  int64_t num_bytes() const { return position_; }

 private:
  DataFile(int fd, const std::string& path, FileSystem& file_system)
      : sink_(fd, path, file_system) {}

  absl::Status pad() {
    constexpr char kZeros[ZipWriter::kAlignment] = {};
    const int64_t padding =
        (ZipWriter::kAlignment - position_ % ZipWriter::kAlignment) %
        ZipWriter::kAlignment;
    position_ += padding;
    return sink_.append(kZeros, static_cast<size_t>(padding));
  }

  FileSink sink_;
  int64_t position_ = 0;
};

// Returns when `done()` does not return an empty optional any more.
template <class F>
auto poll(std::chrono::milliseconds timeout, F done) -> decltype(done()) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::chrono::milliseconds pause{1};
  while (true) {
    auto result = done();
    if (result.has_value() || std::chrono::steady_clock::now() > deadline) {
      return result;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(50));
  }
}

}  // namespace

std::string ShardedCheckpointWriter::temporary_folder(
    const std::string& folder) {
  return beside(folder, "saving");
}

absl::Status ShardedCheckpointWriter::prepare(const std::string& folder,
                                              FileSystem& file_system) {
  const std::string temporary = temporary_folder(folder);
  std::error_code error;
  fs::create_directories(parent_directory(folder), error);
  if (error) {
    return absl::UnavailableError(absl::StrCat("cannot create folder ",
                                               parent_directory(folder), ": ",
                                               error.message()));
  }
  fs::remove_all(temporary, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot remove ", temporary, ": ", error.message()));
  }
  if (const int made = file_system.create_directory(temporary); made < 0) {
    return file_error(made, "create folder", temporary);
  }
  return absl::OkStatus();
}

ShardedCheckpointWriter::ShardedCheckpointWriter(
    std::string folder, int rank, int world_size,
    std::chrono::milliseconds timeout, FileSystem& file_system)
    : folder_(std::move(folder)),
      temporary_(temporary_folder(folder_)),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      file_system_(file_system) {}

std::string ShardedCheckpointWriter::marker(int rank, const char* what) {
  return absl::StrFormat("rank-%05d.%s", rank, what);
}

std::string ShardedCheckpointWriter::in_temporary(
    const std::string& name) const {
  return absl::StrCat(temporary_, "/", name);
}

absl::Status ShardedCheckpointWriter::write(
    const std::vector<ShardToSave>& shards,
    const std::map<std::string, std::string>& state,
    const std::vector<ObjectToSave>& objects) {
  return meet(catch_errors(folder_, [&] { return write_own(shards, objects); }),
              state);
}

absl::Status ShardedCheckpointWriter::give_up(const absl::Status& error) {
  return meet(error, {});
}

// Ends write() of all ranks; `status`: how this rank's own part went. Rank 0
// waits for the others and tells them how it ended, with the folder's new name
// or with "failed".
absl::Status ShardedCheckpointWriter::meet(
    absl::Status status, const std::map<std::string, std::string>& state) {
  if (rank_ == 0) {
    if (status.ok()) {
      status = catch_errors(folder_, [&] { return finish(state); });
    }
    if (!status.ok()) leave_error("failed", status);
    return status;
  }
  if (!status.ok()) {
    leave_error(marker(rank_, "error"), status);
    return status;
  }
  if (auto ended = wait_for_rank_0(); ended.has_value()) return *ended;
  status = absl::DeadlineExceededError(
      absl::StrCat("save of ", folder_, ": rank 0 did not finish within ",
                   std::chrono::duration<double>(timeout_).count(), " s"));
  // Rank 0 removes this file too, from when on it will finish. Whoever is the
  // first decides for all.
  if (file_system_.remove(in_temporary(marker(rank_, "json"))) < 0) {
    if (auto ended = wait_for_rank_0(); ended.has_value()) return *ended;
  }
  leave_error(marker(rank_, "error"), status);
  return status;
}

absl::Status ShardedCheckpointWriter::write_own(
    const std::vector<ShardToSave>& shards,
    const std::vector<ObjectToSave>& objects) {
  const std::string name = data_file_name(rank_);
  FS_ASSIGN_OR_RETURN(const std::unique_ptr<DataFile> file,
                      DataFile::create(in_temporary(name), file_system_));
  ShardedManifest own;
  own.world_size = world_size_;
  for (const ShardToSave& shard : shards) {
    ShardedManifest::Tensor& tensor = own.tensors.emplace_back();
    tensor.path = shard.path;
    tensor.aliases = shard.aliases;
    tensor.dtype = shard.values.scalar_type();
    tensor.sizes = shard.sizes;
    tensor.order = shard.order;
    if (find_dtype(tensor.dtype) == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", tensor.name(), "': no checkpoint holds dtype ",
                       c10::toString(tensor.dtype)));
    }
    for (const TensorBox& box : split_into_boxes(
             shard.sizes, shard.order, shard.begin, shard.values.numel())) {
      FS_ASSIGN_OR_RETURN(
          tensor.pieces.emplace_back(),
          file->add(
              box, shard.order,
              shard.values.narrow(0, box.begin - shard.begin, box.numel)));
    }
    release_pages(shard.values);
  }
  for (const ObjectToSave& object : objects) {
    FS_ASSIGN_OR_RETURN(const int64_t begin, file->add_object(object.pickle));
    objects_.push_back({object.path, name, begin, file->num_bytes() - begin});
  }
  FS_RETURN_IF_ERROR(file->close());
  own.files.push_back({name, file->num_bytes()});
  return write_text(in_temporary(marker(rank_, "json")), own.to_json(),
                    file_system_);
}

// For the others to read; prepare() removes it.
void ShardedCheckpointWriter::leave_error(const std::string& name,
                                          const absl::Status& status) {
  remove_data();
  (void)write_text(in_temporary(name), status.message(), FileSystem::posix());
}

void ShardedCheckpointWriter::remove_data() {
  std::error_code ignored;
  fs::remove(in_temporary(data_file_name(rank_)), ignored);
}

absl::StatusOr<ShardedManifest> ShardedCheckpointWriter::collect() const {
  ShardedManifest manifest;
  manifest.world_size = world_size_;
  const auto start = std::chrono::steady_clock::now();
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - start);
    const auto arrived =
        poll(std::max(timeout_ - passed, std::chrono::milliseconds(0)),
             [&]() -> std::optional<absl::Status> {
               const std::string error = in_temporary(marker(rank, "error"));
               if (exists(in_temporary(marker(rank, "json")))) {
                 return absl::OkStatus();
               }
               if (!exists(error)) return std::nullopt;
               const auto text = read_text(error);
               return absl::AbortedError(absl::StrCat(
                   "rank ", rank, ": ", text.ok() ? *text : "failed"));
             });
    if (!arrived.has_value()) {
      return absl::DeadlineExceededError(absl::StrCat(
          "save of ", folder_, ": rank ", rank, " did not finish within ",
          std::chrono::duration<double>(timeout_).count(), " s"));
    }
    FS_RETURN_IF_ERROR(*arrived);
    FS_ASSIGN_OR_RETURN(const std::string text,
                        read_text(in_temporary(marker(rank, "json"))));
    FS_ASSIGN_OR_RETURN(const ShardedManifest theirs,
                        ShardedManifest::parse(text));
    FS_RETURN_IF_ERROR(manifest.merge(theirs));
  }
  FS_RETURN_IF_ERROR(manifest.check_complete());
  return manifest;
}

absl::Status ShardedCheckpointWriter::finish(
    const std::map<std::string, std::string>& state) {
  FS_ASSIGN_OR_RETURN(ShardedManifest manifest, collect());
  manifest.state = state;
  FS_RETURN_IF_ERROR(write_text(in_temporary(kDcpMetadata),
                                dcp_metadata(manifest, objects_),
                                file_system_));
  FS_RETURN_IF_ERROR(write_text(in_temporary(kManifestName), manifest.to_json(),
                                file_system_));
  for (int rank = 0; rank < world_size_; ++rank) {
    const std::string path = in_temporary(marker(rank, "json"));
    const int error = file_system_.remove(path);
    if (error == -ENOENT) {  // See meet().
      return absl::DeadlineExceededError(absl::StrCat(
          "save of ", folder_, ": rank ", rank, " has stopped waiting"));
    }
    if (error < 0) {
      return file_error(error, "remove", path);
    }
  }
  if (const int error = file_system_.sync_directory(temporary_); error < 0) {
    return file_error(error, "sync folder", temporary_);
  }
  // An older checkpoint of that name steps aside, and comes back on failure.
  const std::string replaced = beside(folder_, "replaced");
  const bool replaces = exists(folder_);
  if (replaces) {
    std::error_code ignored;
    fs::remove_all(replaced, ignored);
    if (const int error = file_system_.rename(folder_, replaced); error < 0) {
      return file_error(error, absl::StrCat("rename ", folder_, " to"),
                        replaced);
    }
  }
  if (const int error = file_system_.rename(temporary_, folder_); error < 0) {
    if (replaces) file_system_.rename(replaced, folder_);
    return file_error(error, absl::StrCat("rename ", temporary_, " to"),
                      folder_);
  }
  const std::string parent = parent_directory(folder_);
  if (const int error = file_system_.sync_directory(parent); error < 0) {
    return file_error(error, "sync folder", parent);
  }
  std::error_code ignored;
  fs::remove_all(replaced, ignored);
  return absl::OkStatus();
}

// Empty: the time is over.
std::optional<absl::Status> ShardedCheckpointWriter::wait_for_rank_0() {
  const std::string failed = in_temporary("failed");
  return poll(timeout_, [&]() -> std::optional<absl::Status> {
    std::error_code error;
    const bool renamed =
        fs::status(temporary_, error).type() == fs::file_type::not_found;
    if (renamed && exists(absl::StrCat(folder_, "/", kManifestName))) {
      return absl::OkStatus();
    }
    if (!exists(failed)) return std::nullopt;
    remove_data();
    const auto text = read_text(failed);
    return absl::AbortedError(absl::StrCat("rank 0 could not finish ", folder_,
                                           ": ", text.ok() ? *text : ""));
  });
}

}  // namespace fullshard
