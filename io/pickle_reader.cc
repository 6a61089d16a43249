#include "fullshard/io/pickle_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "fullshard/core/status.h"
#include "fullshard/io/pickle_machine.h"

namespace fullshard::internal {
namespace {

absl::Status malformed(absl::string_view what) {
  return malformed_pickle(what);
}

constexpr size_t kMaxPickleBytes = size_t{64} << 20;
constexpr size_t kMaxMarks = 4 * kMaxPickleDepth;

// "os\nsystem" as "os.system".
std::string dotted(absl::string_view global) {
  return absl::StrReplaceAll(global, {{"\n", "."}});
}

bool is_allowed_global(absl::string_view global) {
  for (const char* allowed :
       {kOrderedDict, kRebuildTensor, kRebuildTensorV2, kRebuildTensorV3,
        kRebuildParameter, kSize, kDevice, kUntypedStorage}) {
    if (global == allowed) return true;
  }
  return find_dtype_of_storage(strip_torch(global)) != nullptr;
}

// What Python's torch.distributed.checkpoint writes into .metadata.
bool is_dcp_global(absl::string_view global) {
  const absl::string_view metadata = kDcpMetadataPrefix;
  return absl::StartsWith(global, metadata) || global == kDcpStorageInfo ||
         global == kGetLayout || global == kGetattr || global == kOrderedDict ||
         global == kSize || is_posix_path(global);
}

}  // namespace

absl::Status malformed_pickle(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("malformed pickle: ", what));
}

void PickleReader::make_constants() {
  std::deque<PickleNode>& nodes = document_->nodes;
  nodes.resize(4);
  nodes[1].kind = nodes[2].kind = PtKind::kBool;
  nodes[2].integer = 1;
  nodes[3].kind = PtKind::kTuple;
}

absl::StatusOr<Pickle> PickleReader::read() {
  if (rest_.empty() || rest_[0] != static_cast<char>(Opcode::kProto)) {
    return malformed("it does not start with a protocol number");
  }
  while (true) {
    FS_ASSIGN_OR_RETURN(const uint64_t code, little_endian(1));
    if (static_cast<Opcode>(code) == Opcode::kStop) break;
    FS_RETURN_IF_ERROR(run(static_cast<Opcode>(code)));
    if (memory() > max_memory_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("its values need more than ", max_memory_,
                       " bytes of memory, which its size does not explain"));
    }
    if (num_read() > kMaxPickleBytes) {
      return malformed(
          absl::StrCat("more than ", kMaxPickleBytes, " bytes of values"));
    }
  }
  if (stack_.size() != 1 || !marks_.empty()) {
    return malformed("it ends in the middle of a value");
  }
  FS_RETURN_IF_ERROR(check_tree(stack_[0]));
  document_->root = stack_[0];
  return Pickle{PtValue(document_, document_->root), num_read(), storages()};
}

// What the machine holds, without the allocator's own bytes. A full stack
// counts as if it had grown: old and new memory exist together for a while.
size_t PickleReader::memory() const {
  const bool is_full = stack_.size() == stack_.capacity();
  return document_->nodes.size() * sizeof(PickleNode) +
         (num_items_ + (is_full ? 3 : 1) * stack_.capacity() +
          memo_.capacity()) *
             sizeof(uint32_t);
}

std::vector<PickledStorage> PickleReader::storages() const {
  std::vector<PickledStorage> result;
  for (const PickleNode& value : document_->nodes) {
    if (value.kind != PtKind::kStorage) continue;
    const absl::string_view type = document_->nodes[value.items[0]].text;
    const DtypeName* const typed = find_dtype_of_storage(strip_torch(type));
    result.push_back({document_->nodes[value.items[1]].text,
                      typed == nullptr ? 1
                                       : static_cast<int64_t>(
                                             c10::elementSize(typed->dtype)),
                      document_->integer(value.items[2])});
  }
  return result;
}

absl::Status PickleReader::run(Opcode code) {
  switch (code) {
    case Opcode::kNone:
    case Opcode::kNewtrue:
    case Opcode::kNewfalse:
    case Opcode::kBinint:
    case Opcode::kBinint1:
    case Opcode::kBinint2:
    case Opcode::kLong1:
    case Opcode::kBinfloat:
    case Opcode::kBinunicode:
    case Opcode::kBinstring:
    case Opcode::kShortBinstring:
    case Opcode::kShortBinunicode:
      return run_scalar(code);
    case Opcode::kMark:
    case Opcode::kEmptyDict:
    case Opcode::kEmptyList:
    case Opcode::kEmptyTuple:
    case Opcode::kTuple:
    case Opcode::kTuple1:
    case Opcode::kTuple2:
    case Opcode::kTuple3:
    case Opcode::kAppend:
    case Opcode::kAppends:
    case Opcode::kSetitem:
    case Opcode::kSetitems:
      return run_container(code);
    default:
      return run_object(code);
  }
}

absl::Status PickleReader::run_scalar(Opcode code) {
  switch (code) {
    case Opcode::kNone:
      stack_.push_back(none());
      return absl::OkStatus();
    case Opcode::kNewtrue:
    case Opcode::kNewfalse:
      stack_.push_back(boolean(code == Opcode::kNewtrue));
      return absl::OkStatus();
    case Opcode::kBinint: {
      FS_ASSIGN_OR_RETURN(const uint64_t value, little_endian(4));
      return push_integer(static_cast<int32_t>(value));
    }
    case Opcode::kBinint1:
    case Opcode::kBinint2: {
      const size_t num_bytes = code == Opcode::kBinint1 ? 1 : 2;
      FS_ASSIGN_OR_RETURN(const uint64_t value, little_endian(num_bytes));
      return push_integer(static_cast<int64_t>(value));
    }
    case Opcode::kLong1:
      return read_long();
    case Opcode::kBinfloat:
      return read_float();
    default: {
      const bool is_short =
          code == Opcode::kShortBinstring || code == Opcode::kShortBinunicode;
      const size_t length_bytes = is_short ? 1 : 4;
      FS_ASSIGN_OR_RETURN(const uint64_t length, little_endian(length_bytes));
      FS_ASSIGN_OR_RETURN(const absl::string_view text, take(length));
      return push_text(PtKind::kString, text);
    }
  }
}

absl::Status PickleReader::run_container(Opcode code) {
  PickleNode container;
  switch (code) {
    case Opcode::kMark:
      if (marks_.size() > kMaxMarks) return malformed("nested too deeply");
      marks_.push_back(stack_.size());
      return absl::OkStatus();
    case Opcode::kEmptyDict:
      container.kind = PtKind::kDict;
      return push_new(std::move(container));
    case Opcode::kEmptyList:
      container.kind = PtKind::kList;
      return push_new(std::move(container));
    case Opcode::kEmptyTuple:
      stack_.push_back(empty_tuple());
      return absl::OkStatus();
    case Opcode::kTuple1:
    case Opcode::kTuple2:
    case Opcode::kTuple3:
    case Opcode::kAppend:
    case Opcode::kSetitem: {
      size_t count = code == Opcode::kSetitem ? 2 : 1;
      if (code == Opcode::kTuple2) count = 2;
      if (code == Opcode::kTuple3) count = 3;
      std::vector<uint32_t> items(count);
      for (size_t i = count; i-- > 0;) {
        FS_ASSIGN_OR_RETURN(items[i], pop());
      }
      if (code == Opcode::kAppend || code == Opcode::kSetitem) {
        return add_items(code == Opcode::kSetitem, std::move(items));
      }
      return push_tuple(std::move(items));
    }
    default: {
      FS_ASSIGN_OR_RETURN(std::vector<uint32_t> items, pop_to_mark());
      if (code == Opcode::kTuple) return push_tuple(std::move(items));
      return add_items(code == Opcode::kSetitems, std::move(items));
    }
  }
}

absl::Status PickleReader::run_object(Opcode code) {
  switch (code) {
    case Opcode::kProto: {
      FS_ASSIGN_OR_RETURN(const uint64_t protocol, little_endian(1));
      if (protocol == 2 || (is_dcp() && protocol > 2 && protocol <= 5)) {
        return absl::OkStatus();
      }
      return absl::UnimplementedError(
          absl::StrCat("pickle protocol ", protocol, ", expected 2"));
    }
    case Opcode::kBinput:
    case Opcode::kLongBinput: {
      const size_t num_bytes = code == Opcode::kBinput ? 1 : 4;
      FS_ASSIGN_OR_RETURN(const uint64_t slot, little_endian(num_bytes));
      return put(slot);
    }
    case Opcode::kBinget:
    case Opcode::kLongBinget: {
      const size_t num_bytes = code == Opcode::kBinget ? 1 : 4;
      FS_ASSIGN_OR_RETURN(const uint64_t slot, little_endian(num_bytes));
      return get(slot);
    }
    case Opcode::kGlobal:
      return read_global();
    case Opcode::kFrame:
    case Opcode::kMemoize:
    case Opcode::kStackGlobal:
    case Opcode::kNewobj:
      if (is_dcp()) return run_dcp(code);
      return unexpected(code);
    case Opcode::kBinpersid:
      return persistent_id();
    case Opcode::kReduce:
      return reduce();
    case Opcode::kBuild:
      return build();
    default:
      return unexpected(code);
  }
}

absl::Status PickleReader::unexpected(Opcode code) const {
  return malformed(absl::StrCat("unexpected opcode ", static_cast<int>(code),
                                " at byte ", num_read() - 1));
}

// Protocol 4, and instances of classes, which stay names and values.
absl::Status PickleReader::run_dcp(Opcode code) {
  switch (code) {
    case Opcode::kFrame:
      return take(8).status();
    case Opcode::kMemoize:
      return put(memo_.size());
    case Opcode::kStackGlobal: {
      FS_ASSIGN_OR_RETURN(const uint32_t name, pop());
      FS_ASSIGN_OR_RETURN(const uint32_t module, pop());
      if (kind(name) != PtKind::kString || kind(module) != PtKind::kString) {
        return malformed("a global is not named by strings");
      }
      document_->texts.push_back(
          absl::StrCat(node(module).text, "\n", node(name).text));
      return push_global(document_->texts.back());
    }
    default: {
      FS_ASSIGN_OR_RETURN(const uint32_t arguments, pop());
      FS_ASSIGN_OR_RETURN(const uint32_t type, pop());
      if (kind(type) != PtKind::kGlobal || kind(arguments) != PtKind::kTuple) {
        return malformed("an instance of what is not a class");
      }
      return push_text(PtKind::kObject, node(type).text);
    }
  }
}

absl::StatusOr<absl::string_view> PickleReader::take(uint64_t num_bytes) {
  if (num_bytes > rest_.size()) return malformed("cut short");
  const absl::string_view bytes = rest_.substr(0, num_bytes);
  rest_.remove_prefix(num_bytes);
  return bytes;
}

absl::StatusOr<uint64_t> PickleReader::little_endian(size_t num_bytes) {
  FS_ASSIGN_OR_RETURN(const absl::string_view bytes, take(num_bytes));
  uint64_t value = 0;
  for (size_t i = 0; i < num_bytes; ++i) {
    value |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  return value;
}

absl::StatusOr<absl::string_view> PickleReader::take_line() {
  const size_t end = rest_.substr(0, 1024).find('\n');
  if (end == absl::string_view::npos) return malformed("a name has no end");
  FS_ASSIGN_OR_RETURN(const absl::string_view line, take(end + 1));
  return line.substr(0, end);
}

absl::StatusOr<uint32_t> PickleReader::make(PickleNode node) {
  if (document_->nodes.size() >= num_read() / 2 + 4096) {
    return malformed("more values than its size explains");
  }
  num_items_ += node.items.size();
  document_->nodes.push_back(std::move(node));
  return static_cast<uint32_t>(document_->nodes.size() - 1);
}

absl::Status PickleReader::push_new(PickleNode node) {
  FS_ASSIGN_OR_RETURN(const uint32_t index, make(std::move(node)));
  stack_.push_back(index);
  return absl::OkStatus();
}

absl::Status PickleReader::push_integer(int64_t value) {
  if (value >= 0 && value < kNoNode - kInlineInteger) {
    stack_.push_back(static_cast<uint32_t>(value) | kInlineInteger);
    return absl::OkStatus();
  }
  PickleNode node;
  node.kind = PtKind::kInt;
  node.integer = value;
  return push_new(std::move(node));
}

absl::Status PickleReader::push_text(PtKind kind, absl::string_view text) {
  PickleNode node;
  node.kind = kind;
  node.text = text;
  return push_new(std::move(node));
}

absl::StatusOr<uint32_t> PickleReader::pop() {
  const size_t bottom = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() <= bottom) return malformed("its stack is empty");
  const uint32_t top = stack_.back();
  stack_.pop_back();
  return top;
}

absl::StatusOr<std::vector<uint32_t>> PickleReader::pop_to_mark() {
  if (marks_.empty()) return malformed("a mark is missing");
  std::vector<uint32_t> items(
      stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
      stack_.end());
  stack_.resize(marks_.back());
  marks_.pop_back();
  return items;
}

absl::Status PickleReader::push_tuple(std::vector<uint32_t> items) {
  PickleNode node;
  node.kind = PtKind::kTuple;
  node.items = std::move(items);
  return push_new(std::move(node));
}

absl::Status PickleReader::read_long() {
  FS_ASSIGN_OR_RETURN(const uint64_t num_bytes, little_endian(1));
  if (num_bytes > 8) return malformed("an integer of more than 64 bits");
  FS_ASSIGN_OR_RETURN(uint64_t value, little_endian(num_bytes));
  const uint64_t sign = num_bytes == 0 ? 0 : uint64_t{1} << (8 * num_bytes - 1);
  if (num_bytes < 8 && (value & sign) != 0) value -= sign << 1;
  return push_integer(static_cast<int64_t>(value));
}

absl::Status PickleReader::read_float() {
  FS_ASSIGN_OR_RETURN(const uint64_t value, little_endian(8));
  const uint64_t bits = __builtin_bswap64(value);
  PickleNode node;
  node.kind = PtKind::kFloat;
  std::memcpy(&node.number, &bits, sizeof(bits));
  return push_new(std::move(node));
}

absl::Status PickleReader::read_global() {
  const char* start = rest_.data();
  FS_ASSIGN_OR_RETURN(const absl::string_view module, take_line());
  FS_ASSIGN_OR_RETURN(const absl::string_view name, take_line());
  return push_global({start, module.size() + 1 + name.size()});
}

absl::Status PickleReader::push_global(absl::string_view global) {
  const absl::string_view torch_name = strip_torch(global);
  if (find_dtype(torch_name) != nullptr) {
    return push_text(PtKind::kDtype, torch_name);
  }
  if (is_dcp() ? is_dcp_global(global) : is_allowed_global(global)) {
    return push_text(PtKind::kGlobal, global);
  }
  return absl::PermissionDeniedError(absl::StrCat(
      "refused to load \"", dotted(global),
      "\": a checkpoint may hold only containers, numbers, strings, tensors, "
      "parameters, sizes, dtypes and devices"));
}

absl::Status PickleReader::put(uint64_t slot) {
  if (stack_.empty()) return malformed("nothing to remember");
  if (slot > num_read() / 2 + 16) return malformed("a memo out of range");
  if (slot >= memo_.size()) memo_.resize(slot + 1, kNoNode);
  memo_[slot] = stack_.back();
  return absl::OkStatus();
}

absl::Status PickleReader::get(uint64_t slot) {
  if (slot >= memo_.size() || memo_[slot] == kNoNode) {
    return malformed("a reference to nothing");
  }
  stack_.push_back(memo_[slot]);
  return absl::OkStatus();
}

absl::Status PickleReader::add_items(bool to_dict,
                                     std::vector<uint32_t> items) {
  FS_ASSIGN_OR_RETURN(const uint32_t target, pop());
  stack_.push_back(target);
  const PickleNode& container = node(target);
  const bool is_dict =
      container.kind == PtKind::kDict || container.kind == PtKind::kOrderedDict;
  if (to_dict ? !is_dict : container.kind != PtKind::kList) {
    return malformed(
        absl::StrCat("items added to ", kind_name(container.kind)));
  }
  if (to_dict && items.size() % 2 != 0) return malformed("a key has no value");
  num_items_ += items.size();
  std::vector<uint32_t>& all = document_->nodes[target].items;
  all.insert(all.end(), items.begin(), items.end());
  return absl::OkStatus();
}

// Walks every value once; finds loops, depth and unfolded size.
absl::Status PickleReader::check_tree(uint32_t root) {
  struct Frame {
    uint32_t node;
    size_t next;
  };
  constexpr uint64_t kUnseen = 0, kOpen = ~uint64_t{0};
  std::vector<uint64_t> unfolded(document_->nodes.size(), kUnseen);
  if ((root & kInlineInteger) != 0) return absl::OkStatus();
  const uint64_t limit = 8 * num_read() + 4096;
  std::vector<Frame> path = {{root, 0}};
  while (!path.empty()) {
    const uint32_t current = path.back().node;
    const PickleNode& value = node(current);
    if (value.kind == PtKind::kGlobal || value.kind == PtKind::kStorage) {
      return malformed(absl::StrCat(kind_name(value.kind), " as a value"));
    }
    const bool is_leaf = value.kind == PtKind::kTensor;
    if (path.back().next == 0) {
      unfolded[current] = kOpen;
      FS_RETURN_IF_ERROR(check_keys(value));
    }
    if (!is_leaf && path.back().next < value.items.size()) {
      const uint32_t child = value.items[path.back().next++];
      if ((child & kInlineInteger) != 0) continue;
      if (unfolded[child] == kUnseen) {
        path.push_back({child, 0});
        if (path.size() > kMaxPickleDepth)
          return malformed("nested too deeply");
      } else if (unfolded[child] == kOpen) {
        return malformed("a value contains itself");
      }
      continue;
    }
    uint64_t total = 1;
    for (const uint32_t child : value.items) {
      if (is_leaf) break;
      const bool is_integer = (child & kInlineInteger) != 0;
      total = std::min(total + (is_integer ? 1 : unfolded[child]), limit + 1);
    }
    if (total > limit) return malformed("shared values unfold beyond its size");
    unfolded[current] = total;
    path.pop_back();
  }
  return absl::OkStatus();
}

absl::Status PickleReader::check_keys(const PickleNode& dict) {
  if (dict.kind != PtKind::kDict && dict.kind != PtKind::kOrderedDict) {
    return absl::OkStatus();
  }
  std::vector<absl::string_view> names;
  std::vector<int64_t> numbers;
  for (size_t i = 0; i < dict.items.size(); i += 2) {
    const PickleNode& key = node(dict.items[i]);
    if (key.kind == PtKind::kString) names.push_back(key.text);
    if (key.kind == PtKind::kInt) {
      numbers.push_back(integer(dict.items[i]));
    }
  }
  std::sort(names.begin(), names.end());
  std::sort(numbers.begin(), numbers.end());
  const auto name = std::adjacent_find(names.begin(), names.end());
  if (name != names.end()) {
    return malformed(absl::StrCat("key \"", *name, "\" appears twice"));
  }
  const auto number = std::adjacent_find(numbers.begin(), numbers.end());
  if (number != numbers.end()) {
    return malformed(absl::StrCat("key ", *number, " appears twice"));
  }
  return absl::OkStatus();
}

}  // namespace fullshard::internal

namespace fullshard {
namespace {

absl::StatusOr<Pickle> run(absl::string_view bytes,
                           std::shared_ptr<const void> owner,
                           internal::PickleDialect dialect, size_t file_bytes) {
  const size_t max_memory =
      internal::kMemoryPerFileByte * std::min(file_bytes, ~size_t{0} / 16) +
      internal::kFreeMemory;
  return internal::PickleReader(bytes, std::move(owner), dialect, max_memory)
      .read();
}

absl::StatusOr<PtValue> run(std::string bytes,
                            internal::PickleDialect dialect) {
  const auto owner = std::make_shared<const std::string>(std::move(bytes));
  FS_ASSIGN_OR_RETURN(Pickle pickle,
                      run(*owner, owner, dialect, owner->size()));
  return std::move(pickle.root);
}

}  // namespace

absl::StatusOr<PtValue> read_pickle(std::string bytes) {
  return run(std::move(bytes), internal::PickleDialect::kCheckpoint);
}

absl::StatusOr<PtValue> read_dcp_pickle(std::string bytes) {
  return run(std::move(bytes), internal::PickleDialect::kDcp);
}

absl::StatusOr<Pickle> read_pickle_prefix(absl::string_view bytes,
                                          std::shared_ptr<const void> owner,
                                          size_t file_bytes) {
  return run(bytes, std::move(owner), internal::PickleDialect::kCheckpoint,
             file_bytes);
}

}  // namespace fullshard
