#include "fullshard/io/pickle_writer.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "fullshard/io/dtype_names.h"

namespace fullshard {

using internal::Opcode;

PickleWriter::PickleWriter() {
  op(Opcode::kProto);
  little_endian(2, 1);
}

void PickleWriter::little_endian(uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) {
    out_.push_back(static_cast<char>((value >> (8 * i)) & 0xff));
  }
}

void PickleWriter::none() { op(Opcode::kNone); }

void PickleWriter::boolean(bool value) {
  op(value ? Opcode::kNewtrue : Opcode::kNewfalse);
}

void PickleWriter::integer(int64_t value) {
  if (value >= 0 && value <= 0xff) {
    op(Opcode::kBinint1);
    little_endian(static_cast<uint64_t>(value), 1);
  } else if (value == static_cast<int32_t>(value)) {
    op(Opcode::kBinint);
    little_endian(static_cast<uint64_t>(value), 4);
  } else {
    op(Opcode::kLong1);
    little_endian(8, 1);
    little_endian(static_cast<uint64_t>(value), 8);
  }
}

void PickleWriter::number(double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  op(Opcode::kBinfloat);
  for (int i = 7; i >= 0; --i) little_endian(bits >> (8 * i), 1);
}

void PickleWriter::string(absl::string_view value) {
  op(Opcode::kBinunicode);
  little_endian(value.size(), 4);
  absl::StrAppend(&out_, value);
}

void PickleWriter::global(const std::string& module_and_name) {
  const auto [found, is_new] =
      globals_.emplace(module_and_name, static_cast<int>(globals_.size()));
  if (is_new) {
    op(Opcode::kGlobal);
    absl::StrAppend(&out_, module_and_name, "\n");
  }
  op(is_new ? Opcode::kBinput : Opcode::kBinget);
  little_endian(static_cast<uint64_t>(found->second), 1);
}

template <class Integers>
void PickleWriter::tuple(const Integers& values) {
  op(Opcode::kMark);
  for (const int64_t value : values) integer(value);
  op(Opcode::kTuple);
}

void PickleWriter::begin_dict() {
  op(Opcode::kEmptyDict);
  op(Opcode::kMark);
}

void PickleWriter::empty_ordered_dict() {
  global(internal::kOrderedDict);
  op(Opcode::kEmptyTuple);
  op(Opcode::kReduce);
}

void PickleWriter::begin_ordered_dict() {
  empty_ordered_dict();
  op(Opcode::kMark);
}

void PickleWriter::end_dict() { op(Opcode::kSetitems); }

void PickleWriter::tensor(const PickledTensor& tensor) {
  const DtypeName& dtype = *find_dtype(tensor.dtype);
  const bool typed = dtype.storage != nullptr;
  global(typed ? internal::kRebuildTensorV2 : internal::kRebuildTensorV3);
  op(Opcode::kMark);

  op(Opcode::kMark);
  string("storage");
  global(typed ? absl::StrCat(internal::kTorchPrefix, dtype.storage)
               : std::string(internal::kUntypedStorage));
  string(tensor.storage_key);
  string("cpu");
  const auto element_bytes =
      static_cast<int64_t>(c10::elementSize(tensor.dtype));
  integer(typed ? tensor.storage_bytes / element_bytes : tensor.storage_bytes);
  op(Opcode::kTuple);
  op(Opcode::kBinpersid);

  integer(tensor.storage_offset);
  tuple(tensor.sizes);
  tuple(tensor.strides);
  boolean(tensor.requires_grad);
  empty_ordered_dict();
  if (!typed) global(absl::StrCat(internal::kTorchPrefix, dtype.name));
  op(Opcode::kTuple);
  op(Opcode::kReduce);
}

void PickleWriter::begin_tuple() { op(Opcode::kMark); }

void PickleWriter::end_tuple() { op(Opcode::kTuple); }

void PickleWriter::integers(const std::vector<int64_t>& values) {
  for (const int64_t value : values) integer(value);
}

void PickleWriter::begin_list() {
  op(Opcode::kEmptyList);
  op(Opcode::kMark);
}

void PickleWriter::end_list() { op(Opcode::kAppends); }

void PickleWriter::reduce() { op(Opcode::kReduce); }

void PickleWriter::new_object(const std::string& module_and_name) {
  global(module_and_name);
  op(Opcode::kEmptyTuple);
  op(Opcode::kNewobj);
}

void PickleWriter::build() { op(Opcode::kBuild); }

std::string PickleWriter::finish() {
  op(Opcode::kStop);
  return std::move(out_);
}

}  // namespace fullshard
