#include "fullshard/io/pt_value.h"

#include <c10/util/Exception.h>

#include "absl/strings/str_cat.h"
#include "fullshard/io/dtype_names.h"
#include "fullshard/io/pickle_format.h"

namespace fullshard {

using internal::PickleNode;
using internal::strip_torch;

const char* kind_name(PtKind kind) {
  switch (kind) {
    case PtKind::kNone:
      return "None";
    case PtKind::kBool:
      return "a bool";
    case PtKind::kInt:
      return "an integer";
    case PtKind::kFloat:
      return "a float";
    case PtKind::kString:
      return "a string";
    case PtKind::kList:
      return "a list";
    case PtKind::kTuple:
      return "a tuple";
    case PtKind::kSize:
      return "a torch.Size";
    case PtKind::kDict:
      return "a dict";
    case PtKind::kOrderedDict:
      return "an OrderedDict";
    case PtKind::kTensor:
      return "a tensor";
    case PtKind::kDtype:
      return "a dtype";
    case PtKind::kDevice:
      return "a device";
    case PtKind::kObject:
      return "an object";
    case PtKind::kGlobal:
      return "a function or type";
    case PtKind::kStorage:
      return "a storage";
  }
  return "an unknown value";
}

const PickleNode& internal::PickleDocument::node(uint32_t index) const {
  static const PickleNode* const integer = [] {
    auto* const made = new PickleNode();
    made->kind = PtKind::kInt;
    return made;
  }();
  return (index & kInlineInteger) != 0 ? *integer : nodes[index];
}

bool PtValue::as_bool() const {
  TORCH_CHECK(kind() == PtKind::kBool, kind_name(kind()), " is not a bool");
  return node().integer != 0;
}

int64_t PtValue::as_int() const {
  TORCH_CHECK(kind() == PtKind::kInt, kind_name(kind()), " is not an integer");
  return document_->integer(node_);
}

double PtValue::as_float() const {
  TORCH_CHECK(kind() == PtKind::kFloat, kind_name(kind()), " is not a float");
  return node().number;
}

std::string PtValue::as_string() const {
  if (kind() == PtKind::kDevice) {
    return node().integer < 0 ? std::string(node().text)
                              : absl::StrCat(node().text, ":", node().integer);
  }
  TORCH_CHECK(kind() == PtKind::kString, kind_name(kind()), " is not a string");
  return std::string(node().text);
}

c10::ScalarType PtValue::as_dtype() const {
  TORCH_CHECK(kind() == PtKind::kDtype, kind_name(kind()), " is not a dtype");
  return find_dtype(node().text)->dtype;
}

PickledTensor PtValue::as_tensor() const {
  TORCH_CHECK(is_tensor(), kind_name(kind()), " is not a tensor");
  const std::deque<PickleNode>& nodes = document_->nodes;
  const PickleNode& storage = nodes[node().items[0]];
  const absl::string_view storage_type = nodes[storage.items[0]].text;
  const DtypeName* const typed =
      find_dtype_of_storage(strip_torch(storage_type));

  PickledTensor tensor;
  tensor.dtype = find_dtype(node().text)->dtype;
  tensor.storage_key = std::string(nodes[storage.items[1]].text);
  tensor.storage_bytes = document_->integer(storage.items[2]);
  if (typed != nullptr) {
    tensor.storage_bytes *=
        static_cast<int64_t>(c10::elementSize(typed->dtype));
  }
  tensor.storage_offset = document_->integer(node().items[1]);
  if (storage.items.size() > 3) {  // a view of the storage
    tensor.storage_offset += document_->integer(storage.items[3]);
  }
  tensor.requires_grad = node().integer != 0;
  const auto copy = [&](uint32_t index, std::vector<int64_t>* out) {
    const PtValue values = at(index);
    for (const uint32_t item : values.sequence().items) {
      out->push_back(document_->integer(item));
    }
  };
  copy(node().items[2], &tensor.sizes);
  copy(node().items[3], &tensor.strides);
  return tensor;
}

const PickleNode& PtValue::sequence() const {
  return kind() == PtKind::kSize ? document_->nodes[node().items[0]] : node();
}

size_t PtValue::size() const {
  const size_t count = sequence().items.size();
  return is_dict() ? count / 2 : count;
}

PtValue PtValue::item(size_t i) const {
  TORCH_CHECK(i < size() && !is_tensor(), "item ", i, " of ", kind_name(kind()),
              " of ", size());
  return at(sequence().items[is_dict() ? 2 * i + 1 : i]);
}

PtValue PtValue::key(size_t i) const {
  TORCH_CHECK(is_dict() && i < size(), "key ", i, " of ", kind_name(kind()));
  return at(node().items[2 * i]);
}

std::optional<PtValue> PtValue::find(absl::string_view name) const {
  if (!is_dict()) return std::nullopt;
  for (size_t i = 0; i < size(); ++i) {
    const PickleNode& candidate = document_->node(node().items[2 * i]);
    if (candidate.kind == PtKind::kString && candidate.text == name) {
      return item(i);
    }
  }
  return std::nullopt;
}

std::string PtValue::class_name() const {
  TORCH_CHECK(kind() == PtKind::kObject, kind_name(kind()),
              " is not an object");
  const absl::string_view global = node().text;
  return std::string(global.substr(global.find('\n') + 1));
}

std::optional<PtValue> PtValue::state() const {
  TORCH_CHECK(kind() == PtKind::kObject, kind_name(kind()),
              " is not an object");
  if (node().items.empty()) return std::nullopt;
  return at(node().items[0]);
}

}  // namespace fullshard
