#ifndef FULLSHARD_IO_PICKLE_WRITER_H_
#define FULLSHARD_IO_PICKLE_WRITER_H_

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/strings/string_view.h"
#include "fullshard/io/pickle_format.h"
#include "fullshard/io/pickled_tensor.h"

namespace fullshard {

// Writes one value in pickle protocol 2, in the subset that
// torch.load(weights_only=True) accepts. In a dict, keys and values alternate.
class PickleWriter {
 public:
  PickleWriter();

  void none();
  void boolean(bool value);
  void integer(int64_t value);
  void number(double value);
  // Requires: `value` is valid UTF-8 of less than 4 GiB.
  void string(absl::string_view value);

  void begin_dict();
  void begin_ordered_dict();
  void end_dict();

  // Requires: find_dtype(tensor.dtype) is not null.
  void tensor(const PickledTensor& tensor);

  // --- objects of Python classes; `global` is "module\nname"
  void global(const std::string& module_and_name);
  void begin_tuple();
  void end_tuple();
  void integers(const std::vector<int64_t>& values);
  // Items follow.
  void begin_list();
  void end_list();
  // Calls the global before the last with the tuple that was the last.
  void reduce();
  // An instance whose state is to follow, and build() after it.
  void new_object(const std::string& module_and_name);
  void build();

  // Ends the pickle and returns it. No call may follow.
  std::string finish();

 private:
  void op(internal::Opcode code) { out_.push_back(static_cast<char>(code)); }
  void little_endian(uint64_t value, int num_bytes);
  void empty_ordered_dict();
  template <class Integers>
  void tuple(const Integers& values);

  std::string out_;
  std::unordered_map<std::string, int> globals_;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_PICKLE_WRITER_H_
