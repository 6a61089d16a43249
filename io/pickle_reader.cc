#include "fullshard/io/pickle_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "fullshard/core/status.h"
#include "fullshard/io/dtype_names.h"
#include "fullshard/io/pickle_format.h"

namespace fullshard {
namespace {

using internal::Opcode;
using internal::PickleDocument;
using internal::PickleNode;
using internal::strip_torch;

constexpr size_t kMaxPickleBytes = size_t{64} << 20;
constexpr size_t kMaxDimensions = 64;
constexpr uint32_t kMaxDepth = 1000;
constexpr size_t kMemoryPerFileByte = 8;
constexpr size_t kFreeMemory = size_t{1} << 20;
constexpr size_t kMaxMarks = 4 * kMaxDepth;
constexpr uint32_t kNoNode = 0xffffffff;

absl::Status malformed(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("malformed pickle: ", what));
}

// "os\nsystem" as "os.system".
std::string dotted(absl::string_view global) {
  return absl::StrReplaceAll(global, {{"\n", "."}});
}

bool is_allowed_global(absl::string_view global) {
  for (const char* allowed :
       {internal::kOrderedDict, internal::kRebuildTensor,
        internal::kRebuildTensorV2, internal::kRebuildTensorV3,
        internal::kRebuildParameter, internal::kSize, internal::kDevice,
        internal::kUntypedStorage}) {
    if (global == allowed) return true;
  }
  return find_dtype_of_storage(strip_torch(global)) != nullptr;
}

bool is_storage_type(const PickleNode& node) {
  return node.kind == PtKind::kGlobal &&
         (node.text == internal::kUntypedStorage ||
          find_dtype_of_storage(strip_torch(node.text)) != nullptr);
}

// The machine that runs a pickle's opcodes.
class PickleReader {
 public:
  PickleReader(absl::string_view bytes, std::shared_ptr<const void> owner,
               size_t max_memory)
      : document_(std::make_shared<PickleDocument>()),
        num_available_(bytes.size()),
        max_memory_(max_memory),
        rest_(bytes) {
    document_->owner = std::move(owner);
    make_constants();
  }

  absl::StatusOr<Pickle> read();

 private:
  // Shared nodes for what takes one or two bytes in the input.
  void make_constants();
  uint32_t none() const { return 0; }
  uint32_t boolean(bool value) const { return value ? 2 : 1; }
  uint32_t empty_tuple() const { return 3; }

  const PickleNode& node(uint32_t index) { return document_->node(index); }
  int64_t integer(uint32_t index) { return document_->integer(index); }
  PtKind kind(uint32_t index) { return node(index).kind; }

  absl::Status run(Opcode code);
  absl::Status run_scalar(Opcode code);
  absl::Status run_container(Opcode code);
  absl::Status run_object(Opcode code);

  absl::StatusOr<uint64_t> little_endian(size_t num_bytes);
  absl::StatusOr<absl::string_view> take(uint64_t num_bytes);
  absl::StatusOr<absl::string_view> take_line();

  absl::StatusOr<uint32_t> make(PickleNode node);
  absl::Status push_new(PickleNode node);
  absl::Status push_integer(int64_t value);
  absl::Status push_text(PtKind kind, absl::string_view text);
  absl::StatusOr<uint32_t> pop();
  absl::StatusOr<std::vector<uint32_t>> pop_to_mark();
  absl::Status push_tuple(std::vector<uint32_t> items);

  absl::Status read_long();
  absl::Status read_float();
  absl::Status read_global();
  absl::Status put(uint64_t slot);
  absl::Status get(uint64_t slot);
  absl::Status add_items(bool to_dict, std::vector<uint32_t> items);
  absl::Status persistent_id();
  absl::Status reduce();
  absl::Status build();

  absl::Status call(absl::string_view global, uint32_t arguments);
  absl::Status call_ordered_dict(uint32_t pairs);
  absl::Status call_device(const std::vector<uint32_t>& arguments);
  absl::Status call_old_rebuild_tensor(const std::vector<uint32_t>& arguments);
  absl::Status call_rebuild_tensor(const std::vector<uint32_t>& arguments,
                                   bool with_dtype);
  absl::Status call_rebuild_parameter(const std::vector<uint32_t>& arguments);
  absl::StatusOr<const DtypeName*> tensor_dtype(uint32_t storage,
                                                uint32_t dtype);
  absl::Status check_view(uint32_t storage, int64_t element_bytes,
                          uint32_t offset, uint32_t sizes, uint32_t strides);
  const std::vector<uint32_t>* integers(uint32_t tuple);

  absl::Status check_tree(uint32_t root);
  absl::Status check_keys(const PickleNode& dict);

  size_t num_read() const { return num_available_ - rest_.size(); }
  size_t memory() const;
  std::vector<PickledStorage> storages() const;

  std::shared_ptr<PickleDocument> document_;
  const size_t num_available_;
  const size_t max_memory_;
  absl::string_view rest_;
  std::vector<uint32_t> stack_;
  std::vector<size_t> marks_;
  std::vector<uint32_t> memo_;
  size_t num_items_ = 0;  // of all containers
};

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
      const size_t length_bytes = code == Opcode::kShortBinstring ? 1 : 4;
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
      if (protocol == 2) return absl::OkStatus();
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
    case Opcode::kBinpersid:
      return persistent_id();
    case Opcode::kReduce:
      return reduce();
    case Opcode::kBuild:
      return build();
    default:
      return malformed(absl::StrCat("unexpected opcode ",
                                    static_cast<int>(code), " at byte ",
                                    num_read() - 1));
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
  if (value >= 0 && value < kNoNode - internal::kInlineInteger) {
    stack_.push_back(static_cast<uint32_t>(value) | internal::kInlineInteger);
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
  const absl::string_view global(start, module.size() + 1 + name.size());
  const absl::string_view torch_name = strip_torch(global);
  if (find_dtype(torch_name) != nullptr) {
    return push_text(PtKind::kDtype, torch_name);
  }
  if (is_allowed_global(global)) return push_text(PtKind::kGlobal, global);
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

// ("storage", type, key, location, number of elements[, view]) where view, of
// the legacy format, is None or (key, first element, number of elements).
absl::Status PickleReader::persistent_id() {
  FS_ASSIGN_OR_RETURN(const uint32_t tuple, pop());
  const std::vector<uint32_t> items = kind(tuple) == PtKind::kTuple
                                          ? node(tuple).items
                                          : std::vector<uint32_t>();
  if (items.size() < 5 || items.size() > 6 ||
      kind(items[0]) != PtKind::kString || node(items[0]).text != "storage" ||
      !is_storage_type(node(items[1])) || kind(items[2]) != PtKind::kString ||
      kind(items[3]) != PtKind::kString || kind(items[4]) != PtKind::kInt ||
      integer(items[4]) < 0) {
    return malformed("a storage is not described as torch.save does");
  }
  PickleNode storage;
  storage.kind = PtKind::kStorage;
  storage.items = {items[1], items[2], items[4]};
  if (items.size() == 6 && kind(items[5]) != PtKind::kNone) {
    const std::vector<uint32_t>& view = node(items[5]).items;
    if (node(items[1]).text == internal::kUntypedStorage ||
        kind(items[5]) != PtKind::kTuple || view.size() != 3 ||
        kind(view[1]) != PtKind::kInt || kind(view[2]) != PtKind::kInt ||
        integer(view[1]) < 0 || integer(view[2]) < 0 ||
        integer(view[1]) > integer(items[4]) ||
        integer(view[2]) > integer(items[4]) - integer(view[1])) {
      return malformed("a view of a storage reaches out of it");
    }
    storage.items.push_back(view[1]);
    storage.items.push_back(view[2]);
  }
  return push_new(std::move(storage));
}

absl::Status PickleReader::reduce() {
  FS_ASSIGN_OR_RETURN(const uint32_t arguments, pop());
  FS_ASSIGN_OR_RETURN(const uint32_t callee, pop());
  if (kind(callee) != PtKind::kGlobal || kind(arguments) != PtKind::kTuple) {
    return malformed("a call of what is not a function");
  }
  return call(node(callee).text, arguments);
}

absl::Status PickleReader::call(absl::string_view global, uint32_t arguments) {
  const std::vector<uint32_t>& items = node(arguments).items;
  PickleNode result;
  if (global == internal::kOrderedDict && items.empty()) {
    result.kind = PtKind::kOrderedDict;
    return push_new(std::move(result));
  }
  if (global == internal::kOrderedDict && items.size() == 1) {
    return call_ordered_dict(items[0]);
  }
  if (global == internal::kSize && items.size() == 1 &&
      integers(items[0]) != nullptr) {
    result.kind = PtKind::kSize;
    result.items = {items[0]};
    return push_new(std::move(result));
  }
  if (global == internal::kDevice) return call_device(items);
  if (global == internal::kRebuildTensor) return call_old_rebuild_tensor(items);
  if (global == internal::kRebuildTensorV2) {
    return call_rebuild_tensor(items, /*with_dtype=*/false);
  }
  if (global == internal::kRebuildTensorV3) {
    return call_rebuild_tensor(items, /*with_dtype=*/true);
  }
  if (global == internal::kRebuildParameter) {
    return call_rebuild_parameter(items);
  }
  return malformed(absl::StrCat("wrong arguments of \"", dotted(global), "\""));
}

// Python 2 pickles an OrderedDict as a call with a list of [key, value].
absl::Status PickleReader::call_ordered_dict(uint32_t pairs) {
  PickleNode dict;
  dict.kind = PtKind::kOrderedDict;
  if (kind(pairs) != PtKind::kList) {
    return malformed("an OrderedDict is not made of a list");
  }
  for (const uint32_t pair : node(pairs).items) {
    const bool is_pair =
        (kind(pair) == PtKind::kList || kind(pair) == PtKind::kTuple) &&
        node(pair).items.size() == 2;
    if (!is_pair) return malformed("an OrderedDict is not made of pairs");
    dict.items.push_back(node(pair).items[0]);
    dict.items.push_back(node(pair).items[1]);
  }
  return push_new(std::move(dict));
}

absl::Status PickleReader::call_device(const std::vector<uint32_t>& arguments) {
  const bool has_index =
      arguments.size() == 2 && kind(arguments[1]) == PtKind::kInt;
  if (arguments.empty() || kind(arguments[0]) != PtKind::kString ||
      (arguments.size() != 1 && !has_index)) {
    return malformed("wrong arguments of \"torch.device\"");
  }
  PickleNode device;
  device.kind = PtKind::kDevice;
  device.text = node(arguments[0]).text;
  device.integer = has_index ? integer(arguments[1]) : -1;
  return push_new(std::move(device));
}

// (storage, offset, sizes, strides), before PyTorch 0.4.
absl::Status PickleReader::call_old_rebuild_tensor(
    const std::vector<uint32_t>& arguments) {
  if (arguments.size() != 4) {
    return malformed("a tensor is not described as torch.save does");
  }
  std::vector<uint32_t> all = arguments;
  all.push_back(boolean(false));
  all.push_back(none());
  return call_rebuild_tensor(all, /*with_dtype=*/false);
}

// (storage, offset, sizes, strides, requires_grad, hooks[, dtype][, metadata])
absl::Status PickleReader::call_rebuild_tensor(
    const std::vector<uint32_t>& arguments, bool with_dtype) {
  const size_t required = with_dtype ? 7 : 6;
  if (arguments.size() < required || arguments.size() > required + 1 ||
      kind(arguments[0]) != PtKind::kStorage ||
      kind(arguments[4]) != PtKind::kBool) {
    return malformed("a tensor is not described as torch.save does");
  }
  FS_ASSIGN_OR_RETURN(
      const DtypeName* const dtype,
      tensor_dtype(arguments[0], with_dtype ? arguments[6] : kNoNode));
  FS_RETURN_IF_ERROR(check_view(
      arguments[0], static_cast<int64_t>(c10::elementSize(dtype->dtype)),
      arguments[1], arguments[2], arguments[3]));
  PickleNode tensor;
  tensor.kind = PtKind::kTensor;
  tensor.text = dtype->name;
  tensor.integer = integer(arguments[4]);
  tensor.items.assign(arguments.begin(), arguments.begin() + 4);
  return push_new(std::move(tensor));
}

absl::StatusOr<const DtypeName*> PickleReader::tensor_dtype(uint32_t storage,
                                                            uint32_t dtype) {
  const absl::string_view type = node(node(storage).items[0]).text;
  if (dtype != kNoNode && kind(dtype) == PtKind::kDtype) {
    return find_dtype(node(dtype).text);
  }
  const DtypeName* const found = find_dtype_of_storage(strip_torch(type));
  if (dtype != kNoNode || found == nullptr) {
    return malformed("a tensor without a dtype");
  }
  return found;
}

const std::vector<uint32_t>* PickleReader::integers(uint32_t tuple) {
  if (kind(tuple) == PtKind::kSize) tuple = node(tuple).items[0];
  const std::vector<uint32_t>& items = node(tuple).items;
  if (kind(tuple) != PtKind::kTuple || items.size() > kMaxDimensions) {
    return nullptr;
  }
  for (const uint32_t item : items) {
    if (kind(item) != PtKind::kInt || integer(item) < 0) return nullptr;
  }
  return &items;
}

absl::Status PickleReader::check_view(uint32_t storage, int64_t element_bytes,
                                      uint32_t offset, uint32_t sizes,
                                      uint32_t strides) {
  const std::vector<uint32_t>* const size_items = integers(sizes);
  const std::vector<uint32_t>* const stride_items = integers(strides);
  if (kind(offset) != PtKind::kInt || integer(offset) < 0 ||
      size_items == nullptr || stride_items == nullptr ||
      size_items->size() != stride_items->size()) {
    return malformed("a tensor's shape is not described as torch.save does");
  }
  const PickleNode& type = node(node(storage).items[0]);
  const DtypeName* const typed = find_dtype_of_storage(strip_torch(type.text));
  const int64_t unit_bytes =
      typed == nullptr ? 1
                       : static_cast<int64_t>(c10::elementSize(typed->dtype));
  int64_t storage_bytes = 0;
  int64_t end = integer(offset);
  int64_t numel = 1;
  // A view's own number of elements stands last.
  const std::vector<uint32_t>& described = node(storage).items;
  bool overflow = __builtin_mul_overflow(
      integer(described.size() > 3 ? described[4] : described[2]), unit_bytes,
      &storage_bytes);
  bool is_empty = false;
  if (described.size() > 3) {
    int64_t first = 0;
    overflow |= __builtin_add_overflow(end, integer(described[3]), &first);
  }
  for (size_t i = 0; i < size_items->size(); ++i) {
    const int64_t size = integer((*size_items)[i]);
    int64_t span = 0;
    is_empty = is_empty || size == 0;
    overflow |= __builtin_mul_overflow(std::max<int64_t>(size, 1) - 1,
                                       integer((*stride_items)[i]), &span);
    overflow |= __builtin_add_overflow(end, span, &end);
    overflow |=
        __builtin_mul_overflow(numel, std::max<int64_t>(size, 1), &numel);
  }
  overflow |= __builtin_add_overflow(end, is_empty ? 0 : 1, &end);
  overflow |= __builtin_mul_overflow(end, element_bytes, &end);
  overflow |= __builtin_mul_overflow(numel, element_bytes, &numel);
  if (overflow || (!is_empty && end > storage_bytes)) {
    return malformed("a tensor reaches out of its storage");
  }
  return absl::OkStatus();
}

// (data, requires_grad, hooks)
absl::Status PickleReader::call_rebuild_parameter(
    const std::vector<uint32_t>& arguments) {
  if (arguments.size() != 3 || kind(arguments[0]) != PtKind::kTensor ||
      kind(arguments[1]) != PtKind::kBool) {
    return malformed("a parameter is not described as torch.save does");
  }
  PickleNode parameter = node(arguments[0]);
  parameter.integer = integer(arguments[1]);
  return push_new(std::move(parameter));
}

// Sets attributes: state dicts carry `_metadata`, which is not kept.
absl::Status PickleReader::build() {
  FS_ASSIGN_OR_RETURN(const uint32_t state, pop());
  FS_ASSIGN_OR_RETURN(const uint32_t object, pop());
  if (kind(object) != PtKind::kOrderedDict || kind(state) != PtKind::kDict) {
    return malformed(
        absl::StrCat("attributes set on ", kind_name(kind(object))));
  }
  stack_.push_back(object);
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
  if ((root & internal::kInlineInteger) != 0) return absl::OkStatus();
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
      if ((child & internal::kInlineInteger) != 0) continue;
      if (unfolded[child] == kUnseen) {
        path.push_back({child, 0});
        if (path.size() > kMaxDepth) return malformed("nested too deeply");
      } else if (unfolded[child] == kOpen) {
        return malformed("a value contains itself");
      }
      continue;
    }
    uint64_t total = 1;
    for (const uint32_t child : value.items) {
      if (is_leaf) break;
      const bool is_integer = (child & internal::kInlineInteger) != 0;
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

}  // namespace

absl::StatusOr<PtValue> read_pickle(std::string bytes) {
  const auto owner = std::make_shared<const std::string>(std::move(bytes));
  FS_ASSIGN_OR_RETURN(Pickle pickle,
                      read_pickle_prefix(*owner, owner, owner->size()));
  return std::move(pickle.root);
}

absl::StatusOr<Pickle> read_pickle_prefix(absl::string_view bytes,
                                          std::shared_ptr<const void> owner,
                                          size_t file_bytes) {
  const size_t max_memory =
      kMemoryPerFileByte * std::min(file_bytes, ~size_t{0} / 16) + kFreeMemory;
  return PickleReader(bytes, std::move(owner), max_memory).read();
}

}  // namespace fullshard
