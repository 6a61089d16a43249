#include "fullshard/io/full_state_dict.h"

#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "fullshard/core/status.h"
#include "fullshard/io/mapped_file.h"

namespace fullshard {
namespace {

constexpr char kLatestName[] = "latest-checkpoint.pt";
constexpr char kModelKey[] = "model";

bool has_kind(const std::string& path, mode_t kind) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 && (info.st_mode & S_IFMT) == kind;
}

absl::Status copy_file(const std::string& from, const std::string& to,
                       FileSystem& file_system) {
  FS_ASSIGN_OR_RETURN(const std::shared_ptr<MappedFile> source,
                      MappedFile::open(from));
  FS_ASSIGN_OR_RETURN(const std::unique_ptr<AtomicFile> copy,
                      AtomicFile::create(to, file_system));
  FS_RETURN_IF_ERROR(copy->sink().append(source->data(), source->size()));
  return copy->commit();
}

std::string quoted(const std::string& name) {
  return absl::StrCat("\"", name, "\"");
}

// The longest module key that `full_name` starts with.
std::optional<std::string> module_of(const std::string& full_name,
                                     const FullStateDictOptions& options) {
  std::optional<std::string> longest;
  for (const auto* keys : {&options.module_keys, &options.all_module_keys}) {
    for (const std::string& key : *keys) {
      if (absl::StartsWith(full_name, key + ".") &&
          (!longest.has_value() || key.size() > longest->size())) {
        longest = key;
      }
    }
  }
  return longest;
}

}  // namespace

std::string checkpoint_name(int64_t global_step, int64_t epoch,
                            std::optional<double> loss) {
  const std::string text =
      loss.has_value() ? absl::StrFormat("%.4f", *loss) : "inf";
  return absl::StrFormat("step-%06d-epoch-%02d-loss=%s.pt", global_step, epoch,
                         text);
}

absl::StatusOr<bool> is_written(const std::string& path,
                                const std::string& full_name,
                                const FullStateDictOptions& options) {
  if (options.module_keys.empty()) return true;
  const std::optional<std::string> module = module_of(full_name, options);
  if (!module.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", quoted(full_name),
                     " belongs to none of the model's modules"));
  }
  return std::find(options.module_keys.begin(), options.module_keys.end(),
                   *module) != options.module_keys.end();
}

absl::StatusOr<std::unique_ptr<FullStateDictWriter>>
FullStateDictWriter::create(const std::string& path,
                            const FullStateDictOptions& options) {
  PtWriterOptions writer_options;
  // The caller's buffers are used again from unit to unit.
  writer_options.share_storages = false;
  writer_options.ordered_root = options.module_keys.empty();
  writer_options.file_system = options.file_system;
  FS_ASSIGN_OR_RETURN(std::unique_ptr<PtWriter> pt,
                      PtWriter::create(path, writer_options));
  std::unique_ptr<FullStateDictWriter> writer(
      new FullStateDictWriter(std::move(pt), options));
  FS_RETURN_IF_ERROR(writer->announce(options.names));
  return writer;
}

FullStateDictWriter::FullStateDictWriter(std::unique_ptr<PtWriter> writer,
                                         const FullStateDictOptions& options)
    : writer_(std::move(writer)), options_(options) {
  if (options.module_keys.empty()) modules_.push_back(Module{"", {}});
  for (const std::string& key : options.module_keys) {
    module_index_.emplace(key, modules_.size());
    modules_.push_back(Module{key, {}});
  }
}

absl::Status FullStateDictWriter::invalid(const std::string& full_name,
                                          const char* what) const {
  return absl::InvalidArgumentError(
      absl::StrCat(writer_->path(), ": ", quoted(full_name), " ", what));
}

absl::Status FullStateDictWriter::announce(
    const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    FS_ASSIGN_OR_RETURN(const bool written,
                        is_written(writer_->path(), name, options_));
    if (!written) continue;
    size_t module = 0;
    std::string key = name;
    if (!options_.module_keys.empty()) {
      const std::string module_key = *module_of(name, options_);
      module = module_index_.at(module_key);
      key = name.substr(module_key.size() + 1);
    }
    std::vector<Slot>& slots = modules_[module].slots;
    if (!index_.try_emplace(name, module, slots.size()).second) {
      return invalid(name, "appears twice in the state dict");
    }
    slots.push_back(Slot{std::move(key), std::nullopt, std::nullopt});
  }
  return absl::OkStatus();
}

absl::StatusOr<FullStateDictWriter::Slot*> FullStateDictWriter::find_slot(
    const std::string& full_name) {
  const auto found = index_.find(full_name);
  if (found != index_.end()) {
    Slot& slot = modules_[found->second.first].slots[found->second.second];
    if (slot.stored.has_value()) return invalid(full_name, "was added before");
    return &slot;
  }
  FS_ASSIGN_OR_RETURN(const bool written,
                      is_written(writer_->path(), full_name, options_));
  if (!written) return nullptr;
  return invalid(full_name, "is not among the announced names");
}

absl::Status FullStateDictWriter::add(const std::string& full_name,
                                      const at::Tensor& tensor) {
  FS_ASSIGN_OR_RETURN(Slot* const slot, find_slot(full_name));
  if (slot == nullptr) return absl::OkStatus();
  absl::StatusOr<PickledTensor> stored = writer_->store(tensor);
  if (!stored.ok()) return annotate(stored.status(), full_name);
  slot->stored = *std::move(stored);
  return absl::OkStatus();
}

absl::Status FullStateDictWriter::add_tied(const std::string& full_name,
                                           const std::string& added_name) {
  FS_ASSIGN_OR_RETURN(Slot* const slot, find_slot(full_name));
  if (slot == nullptr) return absl::OkStatus();
  const auto found = index_.find(added_name);
  if (found == index_.end()) {
    return invalid(added_name, "is not among the announced names");
  }
  const Slot& source =
      modules_[found->second.first].slots[found->second.second];
  if (!source.stored.has_value()) return invalid(added_name, "was not added");
  slot->stored = source.stored;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<int64_t>> FullStateDictWriter::reserve(
    const std::string& full_name, c10::ScalarType dtype,
    const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  FS_ASSIGN_OR_RETURN(Slot* const slot, find_slot(full_name));
  if (slot == nullptr) return std::nullopt;
  absl::StatusOr<PtWriter::Reserved> reserved =
      writer_->reserve(dtype, sizes, strides);
  if (!reserved.ok()) return annotate(reserved.status(), full_name);
  slot->stored = reserved->stored;
  slot->reserved = *std::move(reserved);
  return slot->reserved->offset;
}

absl::Status FullStateDictWriter::complete(const std::string& full_name,
                                           uint32_t crc) {
  const auto [module, slot] = index_.at(full_name);
  return writer_->complete(*modules_[module].slots[slot].reserved, crc);
}

absl::Status FullStateDictWriter::commit() {
  if (options_.module_keys.empty()) {
    FS_RETURN_IF_ERROR(place(modules_[0]));
    return writer_->commit();
  }
  FS_RETURN_IF_ERROR(writer_->begin_dict(kModelKey));
  for (const Module& module : modules_) {
    FS_RETURN_IF_ERROR(writer_->begin_ordered_dict(module.key));
    FS_RETURN_IF_ERROR(place(module));
    FS_RETURN_IF_ERROR(writer_->end_dict());
  }
  FS_RETURN_IF_ERROR(writer_->end_dict());
  return writer_->commit();
}

absl::Status FullStateDictWriter::place(const Module& module) {
  for (const Slot& slot : module.slots) {
    if (!slot.stored.has_value()) {
      return absl::FailedPreconditionError(absl::StrCat(
          writer_->path(), ": \"", module.key, module.key.empty() ? "" : ".",
          slot.key, "\" was announced but not added"));
    }
    FS_RETURN_IF_ERROR(writer_->place(slot.key, *slot.stored));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<FullStateDictReader>> FullStateDictReader::open(
    const std::string& path) {
  FS_ASSIGN_OR_RETURN(std::unique_ptr<PtReader> pt, PtReader::open(path));
  std::unique_ptr<FullStateDictReader> reader(
      new FullStateDictReader(std::move(pt)));
  FS_RETURN_IF_ERROR(reader->read_names());
  return reader;
}

absl::Status FullStateDictReader::wrong_kind(const std::string& place,
                                             const PtValue& value,
                                             const char* expected) const {
  return absl::InvalidArgumentError(
      absl::StrCat(reader_->path(), ": ", place, " is ",
                   kind_name(value.kind()), ", expected ", expected));
}

absl::Status FullStateDictReader::read_names() {
  PtValue map = reader_->root();
  std::string place;
  if (!map.is_dict()) return wrong_kind("the content", map, "a dict");
  if (const std::optional<PtValue> model = map.find(kModelKey)) {
    if (!model->is_tensor()) {
      map = *model;
      place = quoted(kModelKey);
    }
  }
  if (!map.is_dict()) return wrong_kind(place, map, "a dict");
  if (map.size() == 0 || !map.item(0).is_dict()) {
    return read_map(map, "", place);
  }
  for (size_t i = 0; i < map.size(); ++i) {
    const PtValue key = map.key(i);
    if (key.kind() != PtKind::kString) {
      return wrong_kind("a module key", key, "a string");
    }
    module_keys_.push_back(key.as_string());
    FS_RETURN_IF_ERROR(read_map(map.item(i), key.as_string(), place));
  }
  return absl::OkStatus();
}

absl::Status FullStateDictReader::read_map(const PtValue& map,
                                           const std::string& module_key,
                                           const std::string& place) {
  const std::string here =
      module_key.empty()
          ? place
          : absl::StrCat(place, place.empty() ? "" : " / ", quoted(module_key));
  if (!map.is_dict()) return wrong_kind(here, map, "a dict of tensors");
  for (size_t i = 0; i < map.size(); ++i) {
    const PtValue key = map.key(i);
    if (key.kind() != PtKind::kString) {
      return wrong_kind(absl::StrCat("a key of ", here), key, "a string");
    }
    const std::string name = key.as_string();
    if (!map.item(i).is_tensor()) {
      return wrong_kind(
          absl::StrCat(here, here.empty() ? "" : " / ", quoted(name)),
          map.item(i), "a tensor");
    }
    const std::string full_name =
        module_key.empty() ? name : absl::StrCat(module_key, ".", name);
    if (!tensors_.emplace(full_name, map.item(i)).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          reader_->path(), ": the name ", quoted(full_name), " appears twice"));
    }
    names_.push_back(full_name);
  }
  return absl::OkStatus();
}

bool FullStateDictReader::contains(const std::string& full_name) const {
  return tensors_.count(full_name) > 0;
}

absl::StatusOr<at::Tensor> FullStateDictReader::tensor(
    const std::string& full_name) {
  const auto found = tensors_.find(full_name);
  if (found == tensors_.end()) {
    return absl::NotFoundError(
        absl::StrCat(reader_->path(), ": no tensor ", quoted(full_name)));
  }
  return reader_->tensor(found->second);
}

absl::Status update_latest(const std::string& checkpoint_path,
                           FileSystem& file_system) {
  const std::string latest =
      absl::StrCat(parent_directory(checkpoint_path), "/", kLatestName);
  const std::string target = base_name(checkpoint_path);
  if (target == kLatestName) {
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint_path, " would point to itself"));
  }
  if (replace_symlink(target, latest, file_system).ok()) {
    return absl::OkStatus();
  }
  return annotate(copy_file(checkpoint_path, latest, file_system),
                  absl::StrCat("cannot update ", latest));
}

absl::StatusOr<std::string> resolve_checkpoint(const std::string& path) {
  if (!has_kind(path, S_IFDIR)) {
    if (has_kind(path, S_IFREG)) return path;
    return absl::NotFoundError(absl::StrCat("no checkpoint at ", path));
  }
  for (const char* folder : {"/", "/checkpoints/"}) {
    const std::string latest = absl::StrCat(path, folder, kLatestName);
    if (has_kind(latest, S_IFREG)) return latest;
  }
  return absl::NotFoundError(absl::StrCat("no ", kLatestName, " in ", path,
                                          " or its checkpoints folder"));
}

}  // namespace fullshard
