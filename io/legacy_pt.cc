#include "fullshard/io/legacy_pt.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/io/pickle_reader.h"

namespace fullshard {
namespace {

using Bytes = absl::string_view;

// Protocol, opcode and length, ten bytes of magic number, stop.
constexpr size_t kMagicBytes = 15;
constexpr int64_t kFormatVersion = 1001;
constexpr size_t kCountBytes = 8;

absl::Status damaged(Bytes what) {
  return absl::DataLossError(absl::StrCat("damaged legacy .pt file: ", what));
}

class LegacyReader {
 public:
  explicit LegacyReader(const std::shared_ptr<MappedFile>& file)
      : file_(file), rest_(file->bytes()) {}

  absl::StatusOr<LegacyPt> read() {
    rest_.remove_prefix(std::min(rest_.size(), kMagicBytes));
    FS_RETURN_IF_ERROR(read_version());
    FS_RETURN_IF_ERROR(read_system());
    FS_ASSIGN_OR_RETURN(Pickle value, next());
    FS_ASSIGN_OR_RETURN(const Pickle keys, next());
    LegacyPt result{std::move(value.root), {}};
    FS_RETURN_IF_ERROR(
        find_storages(value.storages, keys.root, &result.storages));
    return result;
  }

 private:
  absl::StatusOr<Pickle> next() {
    FS_ASSIGN_OR_RETURN(Pickle pickle,
                        read_pickle_prefix(rest_, file_, file_->size()));
    rest_.remove_prefix(pickle.num_bytes);
    return pickle;
  }

  absl::Status read_version() {
    FS_ASSIGN_OR_RETURN(const Pickle version, next());
    if (version.root.kind() == PtKind::kInt &&
        version.root.as_int() == kFormatVersion) {
      return absl::OkStatus();
    }
    return damaged(absl::StrCat("its version is not ", kFormatVersion));
  }

  absl::Status read_system() {
    FS_ASSIGN_OR_RETURN(const Pickle system, next());
    const std::optional<PtValue> little = system.root.find("little_endian");
    if (!little.has_value() || little->kind() != PtKind::kBool) {
      return damaged("it does not name its byte order");
    }
    if (little->as_bool()) return absl::OkStatus();
    return absl::UnimplementedError(
        "written on a big-endian machine, expected little-endian");
  }

  absl::Status find_storages(const std::vector<PickledStorage>& named,
                             const PtValue& keys,
                             std::unordered_map<std::string, Bytes>* storages) {
    std::map<Bytes, int64_t> element_bytes;
    for (const PickledStorage& storage : named) {
      const auto [known, is_new] =
          element_bytes.emplace(storage.key, storage.element_bytes);
      if (!is_new && known->second != storage.element_bytes) {
        return damaged(absl::StrCat("storage \"", storage.key,
                                    "\" has two different types"));
      }
    }
    if (keys.kind() != PtKind::kList) return damaged("no list of storages");
    for (size_t i = 0; i < keys.size(); ++i) {
      if (keys.item(i).kind() != PtKind::kString) {
        return damaged("a storage's key is not a string");
      }
      const std::string key = keys.item(i).as_string();
      const auto found = element_bytes.find(key);
      if (found == element_bytes.end()) {
        return damaged(absl::StrCat("nothing uses storage \"", key, "\""));
      }
      FS_ASSIGN_OR_RETURN(const Bytes bytes, take(key, found->second));
      if (!storages->emplace(key, bytes).second) {
        return damaged(absl::StrCat("storage \"", key, "\" comes twice"));
      }
    }
    if (storages->size() != element_bytes.size()) {
      return damaged(absl::StrCat(storages->size(), " storages, expected ",
                                  element_bytes.size()));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Bytes> take(const std::string& key, int64_t element_bytes) {
    uint64_t count = 0;
    for (size_t i = std::min(kCountBytes, rest_.size()); i-- > 0;) {
      count = count << 8 | static_cast<unsigned char>(rest_[i]);
    }
    uint64_t size = 0;
    if (rest_.size() < kCountBytes ||
        __builtin_mul_overflow(count, static_cast<uint64_t>(element_bytes),
                               &size) ||
        size > rest_.size() - kCountBytes) {
      return damaged(absl::StrCat("cut short: storage \"", key, "\" has ",
                                  count, " elements, but ", rest_.size(),
                                  " bytes are left"));
    }
    const Bytes bytes = rest_.substr(kCountBytes, size);
    rest_.remove_prefix(kCountBytes + size);
    return bytes;
  }

  const std::shared_ptr<MappedFile>& file_;
  Bytes rest_;
};

}  // namespace

absl::StatusOr<LegacyPt> read_legacy_pt(
    const std::shared_ptr<MappedFile>& file) {
  return LegacyReader(file).read();
}

}  // namespace fullshard
