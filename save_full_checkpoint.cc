#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/catch_errors.h"
#include "fullshard/core/max_over_ranks.h"
#include "fullshard/core/status.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/full_checkpoint.h"
#include "fullshard/io/byte_sink.h"
#include "fullshard/io/crc32.h"
#include "fullshard/io/full_checkpoint_writer.h"

namespace fullshard {
namespace {

constexpr int64_t kNotWritten = -1;
// Stays in the cache between its checksum and its write.
constexpr int64_t kPieceBytes = int64_t{1} << 20;

void broadcast_from_rank_0(const ProcessGroups& groups, at::Tensor tensor) {
  if (groups.world_size() == 1 || tensor.numel() == 0) return;
  std::vector<at::Tensor> bytes = {tensor.view(at::kByte)};
  CollectiveScope scope("broadcast of a save", nullptr, 0);
  groups.world()->broadcast(bytes)->wait();
}

at::Tensor integers(const ProcessGroups& groups, std::vector<int64_t> sizes) {
  return at::full(sizes, kNotWritten,
                  at::TensorOptions(groups.device()).dtype(at::kLong));
}

// What one rank wrote of one tensor.
struct WrittenRange {
  int64_t target = 0;
  int64_t begin = 0;  // In the tensor, in bytes.
  int64_t num_bytes = 0;
  int64_t crc = 0;
};
constexpr int64_t kRangeFields = 4;

// Returns every rank's ranges. Collective.
std::vector<WrittenRange> all_ranges(const ProcessGroups& groups,
                                     const std::vector<WrittenRange>& own) {
  const int64_t most = max_over_ranks(groups, static_cast<int64_t>(own.size()),
                                      "all_reduce of a save");
  at::Tensor mine = integers(groups, {most, kRangeFields});
  const at::Tensor host =
      at::empty({static_cast<int64_t>(own.size()), kRangeFields}, at::kLong);
  int64_t* out = host.mutable_data_ptr<int64_t>();
  for (const WrittenRange& range : own) {
    for (int64_t field :
         {range.target, range.begin, range.num_bytes, range.crc}) {
      *out++ = field;
    }
  }
  mine.narrow(0, 0, host.size(0)).copy_(host);
  at::Tensor all = mine;
  if (groups.world_size() > 1 && most > 0) {
    all = integers(groups, {groups.world_size() * most, kRangeFields});
    at::Tensor all_bytes = all.view(at::kByte);
    at::Tensor own_bytes = mine.view(at::kByte);
    CollectiveScope scope("all_gather of a save", nullptr, 0);
    groups.world()->_allgather_base(all_bytes, own_bytes)->wait();
  }
  all = all.cpu();
  std::vector<WrittenRange> ranges;
  const int64_t* in = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < all.size(0); ++i, in += kRangeFields) {
    if (in[0] != kNotWritten) ranges.push_back({in[0], in[1], in[2], in[3]});
  }
  return ranges;
}

class FullSave {
 public:
  FullSave(const ShardedModule& model, const std::string& path,
           const FullCheckpointOptions& options)
      : groups_(model.groups()),
        model_(model),
        path_(path),
        file_system_(options.file_system != nullptr ? *options.file_system
                                                    : FileSystem::posix()),
        shards_(model.local_shards()) {
    options_.module_keys = options.module_keys;
    options_.all_module_keys = options.all_module_keys;
    options_.file_system = options.file_system;
  }

  ~FullSave() {
    if (fd_ >= 0) ::close(fd_);
  }
  FullSave(const FullSave&) = delete;
  FullSave& operator=(const FullSave&) = delete;

  absl::Status run() {
    absl::Status status;
    if (groups_.rank() == 0) {
      status = catch_errors(path_, [&] { return open(); });
    }
    FS_RETURN_IF_ERROR(agree(groups_, status, path_));
    const bool together = can_write_together();
    return together ? write_together() : write_through_rank_0();
  }

 private:
  // An entry of the state dict: one of the shards, under one of its names.
  struct Target {
    std::string name;
    size_t shard;
  };

  // Rank 0: creates the file.
  absl::Status open();
  StateDictTensor describe(const std::string& name,
                           const LocalShard& shard) const {
    return {name, shard.values.scalar_type(), shard.sizes, shard.order};
  }
  std::vector<Target> targets() const;
  bool can_write_together();
  absl::Status write_together();
  absl::Status reserve(const std::vector<Target>& targets, at::Tensor places);
  absl::Status write_own(const std::vector<Target>& targets,
                         const at::Tensor& places,
                         std::vector<WrittenRange>& written);
  absl::Status finish(const std::vector<Target>& targets,
                      const at::Tensor& places,
                      std::vector<WrittenRange> ranges);
  absl::Status write_through_rank_0();

  const ProcessGroups& groups_;
  const ShardedModule& model_;
  const std::string path_;
  FileSystem& file_system_;
  const std::vector<LocalShard> shards_;
  FullStateDictOptions options_;
  std::unique_ptr<FullCheckpointWriter> writer_;  // On rank 0.
  int fd_ = -1;  // Of the same file, for this rank's elements.
};

absl::Status FullSave::open() {
  std::unordered_map<std::string, StateDictTensor> by_name;
  for (const LocalShard& shard : shards_) {
    by_name[shard.name] = describe(shard.name, shard);
    for (const std::string& alias : shard.aliases) {
      by_name[alias] = describe(alias, shard);
    }
  }
  for (const auto& [name, tensor] : model_.whole_tensors()) {
    by_name[name] = {name, tensor.scalar_type(), tensor.sizes().vec(), {}};
  }
  std::vector<StateDictTensor> tensors;
  for (const std::string& name : model_.state_dict_names()) {
    const auto found = by_name.find(name);
    if (found != by_name.end()) tensors.push_back(found->second);
  }
  FS_ASSIGN_OR_RETURN(writer_,
                      FullCheckpointWriter::create(path_, tensors, options_));
  return absl::OkStatus();
}

// The same on every rank, but for the writer that rank 0 alone has.
std::vector<FullSave::Target> FullSave::targets() const {
  const bool shares = !FullCheckpointWriter::is_safetensors(path_);
  std::vector<Target> targets;
  for (size_t i = 0; i < shards_.size(); ++i) {
    targets.push_back({shards_[i].name, i});
    if (shares) continue;
    for (const std::string& alias : shards_[i].aliases) {
      targets.push_back({alias, i});
    }
  }
  return targets;
}

// Opens rank 0's file on every rank. It is the same one, and not another of
// that name on another host, if it has the same inode.
bool FullSave::can_write_together() {
  constexpr int64_t kLongestPath = 4096;
  at::Tensor message = at::zeros({kLongestPath + 8}, at::kByte);
  char* const text = static_cast<char*>(message.mutable_data_ptr());
  bool possible = true;
  for (const LocalShard& shard : shards_) {
    possible = possible && FullCheckpointWriter::keeps_order(
                               path_, describe(shard.name, shard));
  }
  if (groups_.rank() == 0) {
    const std::string& temporary = writer_->temporary_path();
    struct stat info = {};
    possible = possible && temporary.size() < kLongestPath &&
               ::stat(temporary.c_str(), &info) == 0;
    if (possible) {
      std::memcpy(text, &info.st_ino, sizeof(info.st_ino));
      std::memcpy(text + 8, temporary.data(), temporary.size());
    }
  }
  message = message.to(groups_.device());
  broadcast_from_rank_0(groups_, message);
  message = message.cpu();
  if (possible) {
    const char* const got = static_cast<const char*>(message.const_data_ptr());
    fd_ = file_system_.open_to_write(got + 8);
    struct stat info = {};
    possible = fd_ >= 0 && ::fstat(fd_, &info) == 0 &&
               std::memcmp(got, &info.st_ino, sizeof(info.st_ino)) == 0;
  }
  return max_over_ranks(groups_, possible ? 0 : 1, "all_reduce of a save") == 0;
}

absl::Status FullSave::write_together() {
  const std::vector<Target> targets = this->targets();
  at::Tensor places = integers(groups_, {static_cast<int64_t>(targets.size())});
  absl::Status status;
  if (groups_.rank() == 0) {
    status = catch_errors(path_, [&] { return reserve(targets, places); });
  }
  broadcast_from_rank_0(groups_, places);
  std::vector<WrittenRange> written;
  if (status.ok()) {
    status = catch_errors(
        path_, [&] { return write_own(targets, places.cpu(), written); });
  }
  const std::vector<WrittenRange> ranges = all_ranges(groups_, written);
  FS_RETURN_IF_ERROR(agree(groups_, status, path_));
  if (groups_.rank() == 0) {
    status = catch_errors(
        path_, [&] { return finish(targets, places.cpu(), ranges); });
  }
  return agree(groups_, status, path_);
}

absl::Status FullSave::reserve(const std::vector<Target>& targets,
                               at::Tensor places) {
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto place =
        writer_->reserve(describe(targets[i].name, shards_[targets[i].shard]));
    FS_RETURN_IF_ERROR(place.status());
    places[static_cast<int64_t>(i)] = place->value_or(kNotWritten);
  }
  return absl::OkStatus();
}

absl::Status FullSave::write_own(const std::vector<Target>& targets,
                                 const at::Tensor& places,
                                 std::vector<WrittenRange>& written) {
  FileSink sink(std::exchange(fd_, -1), path_, file_system_);
  for (size_t i = 0; i < targets.size(); ++i) {
    const LocalShard& shard = shards_[targets[i].shard];
    const int64_t place = places.const_data_ptr<int64_t>()[i];
    if (!shard.own_turn || shard.values.numel() == 0 || place == kNotWritten) {
      continue;
    }
    const at::Tensor values = shard.values.cpu();
    const char* data = static_cast<const char*>(values.const_data_ptr());
    WrittenRange range;
    range.target = static_cast<int64_t>(i);
    range.begin = shard.begin * static_cast<int64_t>(values.element_size());
    range.num_bytes = static_cast<int64_t>(values.nbytes());
    FS_RETURN_IF_ERROR(sink.seek(place + range.begin));
    uint32_t crc = 0;
    for (int64_t at = 0; at < range.num_bytes; at += kPieceBytes) {
      const auto size =
          static_cast<size_t>(std::min(kPieceBytes, range.num_bytes - at));
      crc = crc32(crc, data + at, size);
      FS_RETURN_IF_ERROR(sink.append(data + at, size));
    }
    range.crc = crc;
    written.push_back(range);
  }
  return sink.close();
}

// Rank 0, once all elements are on disk.
absl::Status FullSave::finish(const std::vector<Target>& targets,
                              const at::Tensor& places,
                              std::vector<WrittenRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) {
    return std::tie(a.target, a.begin) < std::tie(b.target, b.begin);
  });
  auto range = ranges.cbegin();
  for (size_t i = 0; i < targets.size(); ++i) {
    if (places.const_data_ptr<int64_t>()[i] == kNotWritten) continue;
    const LocalShard& shard = shards_[targets[i].shard];
    auto num_bytes = static_cast<int64_t>(shard.values.element_size());
    for (const int64_t size : shard.sizes) num_bytes *= size;
    uint32_t crc = 0;
    int64_t end = 0;
    for (; range != ranges.cend() && range->target == static_cast<int64_t>(i);
         ++range) {
      TORCH_INTERNAL_ASSERT(range->begin == end, targets[i].name);
      crc = crc32_combine(crc, static_cast<uint32_t>(range->crc),
                          range->num_bytes);
      end += range->num_bytes;
    }
    TORCH_INTERNAL_ASSERT(end == num_bytes, targets[i].name);
    FS_RETURN_IF_ERROR(writer_->complete(targets[i].name, crc));
    if (!writer_->shares()) continue;
    for (const std::string& alias : shard.aliases) {
      FS_RETURN_IF_ERROR(writer_->add_tied(alias, shard.name));
    }
  }
  for (const auto& [name, tensor] : model_.whole_tensors()) {
    FS_RETURN_IF_ERROR(writer_->add(name, tensor));
  }
  return writer_->commit();
}

absl::Status FullSave::write_through_rank_0() {
  at::Tensor last;  // Aliases of a tied tensor come right after it.
  std::string last_name;
  return annotate(model_.full_state_dict(
                      [&](const std::string& name, const at::Tensor& tensor) {
                        if (writer_->shares() && tensor.is_same(last)) {
                          return writer_->add_tied(name, last_name);
                        }
                        last = tensor;
                        last_name = name;
                        return writer_->add(name, tensor);
                      },
                      /*all_ranks=*/false, [&] { return writer_->commit(); }),
                  path_);
}

}  // namespace

absl::Status save_full_checkpoint(const ShardedModule& model,
                                  const std::string& path,
                                  const FullCheckpointOptions& options) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  return catch_errors(absl::StrCat("save of ", path),
                      [&] { return FullSave(model, path, options).run(); });
}

}  // namespace fullshard
