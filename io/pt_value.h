#ifndef FULLSHARD_IO_PT_VALUE_H_
#define FULLSHARD_IO_PT_VALUE_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "fullshard/io/pickled_tensor.h"

namespace fullshard {

enum class PtKind : uint8_t {
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kSize,
  kDict,
  kOrderedDict,
  kTensor,
  kDtype,
  kDevice,
  kObject,  // Of a class of torch.distributed.checkpoint.
  // Only while a pickle is read; never in its result.
  kGlobal,
  kStorage,
};

// "a dict", "an integer", ...
const char* kind_name(PtKind kind);

namespace internal {

// Nodes refer to each other by index, so shared values stay shared and nothing
// is freed recursively.
struct PickleNode {
  PtKind kind = PtKind::kNone;
  union {
    int64_t integer = 0;  // kBool, kInt; requires_grad of kTensor
    double number;
  };
  absl::string_view text;       // kString, kDevice, kGlobal, kDtype
  std::vector<uint32_t> items;  // a dict's keys and values alternate
};

// An index with this bit is an integer of 0 to 2^31 - 2 itself, for lists of
// them are the one thing that is large in a pickle.
constexpr uint32_t kInlineInteger = 0x80000000;

struct PickleDocument {
  std::shared_ptr<const void> owner;  // keeps what `text` of a node views
  std::deque<std::string> texts;      // that are not in the pickle as such
  std::deque<PickleNode> nodes;
  uint32_t root = 0;

  // Of an integer, only the kind; see integer().
  const PickleNode& node(uint32_t index) const;
  // Of a kBool or kInt.
  int64_t integer(uint32_t index) const {
    return (index & kInlineInteger) != 0 ? index & ~kInlineInteger
                                         : nodes[index].integer;
  }
};

}  // namespace internal

// A value of a checkpoint. A cheap handle; it keeps the whole tree alive.
// Asking for what the value is not is a programming error (TORCH_CHECK).
class PtValue {
 public:
  PtValue(std::shared_ptr<const internal::PickleDocument> document,
          uint32_t node)
      : document_(std::move(document)), node_(node) {}

  PtKind kind() const { return node().kind; }
  bool is_tensor() const { return kind() == PtKind::kTensor; }
  bool is_dict() const {
    return kind() == PtKind::kDict || kind() == PtKind::kOrderedDict;
  }

  bool as_bool() const;
  int64_t as_int() const;
  double as_float() const;
  std::string as_string() const;  // kString; kDevice as "cuda:0"
  c10::ScalarType as_dtype() const;
  PickledTensor as_tensor() const;

  // Lists, tuples, sizes and dicts: the number of items, item i (of a dict, its
  // value) and the key of entry i.
  size_t size() const;
  PtValue item(size_t i) const;
  PtValue key(size_t i) const;
  // The value of a string key, by linear search.
  std::optional<PtValue> find(absl::string_view key) const;

  // Of a kObject: "Metadata", and what its __dict__ is.
  std::string class_name() const;
  std::optional<PtValue> state() const;

 private:
  const internal::PickleNode& node() const { return document_->node(node_); }
  const internal::PickleNode& sequence() const;
  PtValue at(uint32_t node) const { return PtValue(document_, node); }

  std::shared_ptr<const internal::PickleDocument> document_;
  uint32_t node_;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_PT_VALUE_H_
