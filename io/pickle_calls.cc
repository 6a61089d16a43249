// What a pickle may call: the functions that build tensors and containers.

#include <algorithm>
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

constexpr size_t kMaxDimensions = 64;

// "os\nsystem" as "os.system".
std::string dotted(absl::string_view global) {
  return absl::StrReplaceAll(global, {{"\n", "."}});
}

bool is_storage_type(const PickleNode& node) {
  return node.kind == PtKind::kGlobal &&
         (node.text == kUntypedStorage ||
          find_dtype_of_storage(strip_torch(node.text)) != nullptr);
}

}  // namespace

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
    if (node(items[1]).text == kUntypedStorage ||
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
  if (global == kOrderedDict && items.empty()) {
    result.kind = PtKind::kOrderedDict;
    return push_new(std::move(result));
  }
  if (global == kOrderedDict && items.size() == 1) {
    return call_ordered_dict(items[0]);
  }
  if (global == kSize && items.size() == 1 && integers(items[0]) != nullptr) {
    result.kind = PtKind::kSize;
    result.items = {items[0]};
    return push_new(std::move(result));
  }
  if (is_dcp()) return call_dcp(global, items);
  if (global == kDevice) return call_device(items);
  if (global == kRebuildTensor) return call_old_rebuild_tensor(items);
  if (global == kRebuildTensorV2) {
    return call_rebuild_tensor(items, /*with_dtype=*/false);
  }
  if (global == kRebuildTensorV3) {
    return call_rebuild_tensor(items, /*with_dtype=*/true);
  }
  if (global == kRebuildParameter) {
    return call_rebuild_parameter(items);
  }
  return malformed(absl::StrCat("wrong arguments of \"", dotted(global), "\""));
}

// Enumerations and layouts become what names them.
absl::Status PickleReader::call_dcp(absl::string_view global,
                                    const std::vector<uint32_t>& arguments) {
  if (is_posix_path(global)) {
    PickleNode path;
    path.kind = PtKind::kObject;
    path.text = global;
    return push_new(std::move(path));
  }
  const bool is_enum = absl::StartsWith(global, kDcpMetadataPrefix);
  if ((is_enum || global == kGetLayout) && arguments.size() == 1) {
    stack_.push_back(arguments[0]);
    return absl::OkStatus();
  }
  if (global == kGetattr && arguments.size() == 2 &&
      kind(arguments[1]) == PtKind::kString) {
    stack_.push_back(arguments[1]);
    return absl::OkStatus();
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
  if (kind(object) == PtKind::kObject) {
    num_items_ += 1;
    document_->nodes[object].items = {state};
    stack_.push_back(object);
    return absl::OkStatus();
  }
  if (kind(object) != PtKind::kOrderedDict || kind(state) != PtKind::kDict) {
    return malformed(
        absl::StrCat("attributes set on ", kind_name(kind(object))));
  }
  stack_.push_back(object);
  return absl::OkStatus();
}

}  // namespace fullshard::internal
