// Files written here are opened by Python's torch, and the other way round,
// with every value equal bit for bit. Needs the Python that bazelw sets up.

#include <cstdio>
#include <cstring>
#include <string>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "fullshard/io/full_state_dict.h"
#include "fullshard/io/pt_reader.h"
#include "fullshard/io/pt_writer.h"
#include "fullshard/tests/io/python.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

// Checks what C++ wrote, then writes what C++ will check. Every tensor `x` has
// a companion `x.bytes` with its elements' bytes in order.
constexpr char kScript[] = R"(
import collections, sys, torch

def raw(t):
    t = t.detach().contiguous()
    size = t.element_size()
    s = bytes(t.untyped_storage())
    begin = t.storage_offset() * size
    return list(s[begin:begin + t.numel() * size])

def check(path, mmap):
    d = torch.load(path, weights_only=True, mmap=mmap)
    inner = d["tensors"]
    assert type(d) is dict and type(inner) is collections.OrderedDict
    names = [n for n in inner if not n.endswith(".bytes")]
    for n in names:
        expected = inner[n + ".bytes"].tolist()
        assert raw(inner[n]) == expected, n
        assert str(inner[n].dtype) == n.split("/")[0], (inner[n].dtype, n)
    assert inner[names[0]].shape == (3, 2)
    assert d["step"] == 7 and d["name"] == "run \u00e9" and d["none"] is None
    assert d["rate"] == 0.125 and d["flag"] is True
    assert d["scalar"].shape == () and d["empty"].shape == (0, 4)
    assert d["tied"].untyped_storage().data_ptr() == \
        d["tied2"].untyped_storage().data_ptr()
    return inner

inner = check(sys.argv[1], False)
check(sys.argv[1], True)
out = collections.OrderedDict()
for n, t in inner.items():
    out[n] = t
base = torch.arange(12.0).view(3, 4)
out["torch.float32/view"] = base.t()
out["torch.float32/view.bytes"] = torch.tensor(raw(base.t()), dtype=torch.uint8)
out["torch.float32/slice"] = base[1:, ::2]
out["torch.float32/slice.bytes"] = torch.tensor(raw(base[1:, ::2]), dtype=torch.uint8)
out["torch.float32/parameter"] = torch.nn.Parameter(base)
out["torch.float32/parameter.bytes"] = torch.tensor(raw(base), dtype=torch.uint8)
everything = {"tensors": out, "scalar": torch.tensor(3), "empty": torch.empty(0, 4),
              "step": 7, "nested": {"list": [1, 2.5, "x", None, (True,)]}}
torch.save(everything, sys.argv[2])
torch.save(everything, sys.argv[3], _use_new_zipfile_serialization=False)
print("python agrees")
)";

std::string python_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
      return "torch.uint8";
    case at::kChar:
      return "torch.int8";
    case at::kShort:
      return "torch.int16";
    case at::kInt:
      return "torch.int32";
    case at::kLong:
      return "torch.int64";
    case at::kHalf:
      return "torch.float16";
    case at::kFloat:
      return "torch.float32";
    case at::kDouble:
      return "torch.float64";
    case at::kBool:
      return "torch.bool";
    case at::kBFloat16:
      return "torch.bfloat16";
    case at::kUInt16:
      return "torch.uint16";
    case at::kUInt32:
      return "torch.uint32";
    case at::kUInt64:
      return "torch.uint64";
    case at::kComplexHalf:
      return "torch.complex32";
    case at::kComplexFloat:
      return "torch.complex64";
    case at::kComplexDouble:
      return "torch.complex128";
    case at::kFloat8_e5m2:
      return "torch.float8_e5m2";
    case at::kFloat8_e4m3fn:
      return "torch.float8_e4m3fn";
    case at::kFloat8_e5m2fnuz:
      return "torch.float8_e5m2fnuz";
    case at::kFloat8_e4m3fnuz:
      return "torch.float8_e4m3fnuz";
    case at::kFloat8_e8m0fnu:
      return "torch.float8_e8m0fnu";
    default:
      return "";
  }
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  const std::string bytes = logical_bytes(tensor);
  at::Tensor out = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(out.data_ptr(), bytes.data(), bytes.size());
  return out;
}

void write_file(const std::string& path) {
  auto writer = PtWriter::create(path).value();
  ASSERT_TRUE(writer->begin_ordered_dict("tensors").ok());
  for (const at::ScalarType dtype : all_dtypes()) {
    const std::string name = python_name(dtype);
    if (name.empty()) continue;  // Python cannot make or view these.
    const at::Tensor whole = make_tensor(dtype, {3, 2});
    for (const auto& [suffix, tensor] :
         {std::pair<std::string, at::Tensor>("plain", whole),
          std::pair<std::string, at::Tensor>("transposed", whole.t())}) {
      const std::string key = absl::StrCat(name, "/", suffix);
      ASSERT_TRUE(writer->tensor(key, tensor).ok()) << key;
      ASSERT_TRUE(writer->tensor(key + ".bytes", bytes_of(tensor)).ok());
    }
  }
  ASSERT_TRUE(writer->end_dict().ok());
  const at::Tensor tied = make_tensor(at::kFloat, {4});
  ASSERT_TRUE(writer->tensor("scalar", make_tensor(at::kLong, {})).ok());
  ASSERT_TRUE(writer->tensor("empty", make_tensor(at::kFloat, {0, 4})).ok());
  ASSERT_TRUE(writer->tensor("tied", tied).ok());
  ASSERT_TRUE(writer->tensor("tied2", tied).ok());
  ASSERT_TRUE(writer->value("step", int64_t{7}).ok());
  ASSERT_TRUE(writer->value("name", std::string("run \xc3\xa9")).ok());
  ASSERT_TRUE(writer->value("none", std::monostate()).ok());
  ASSERT_TRUE(writer->value("rate", 0.125).ok());
  ASSERT_TRUE(writer->value("flag", true).ok());
  ASSERT_TRUE(writer->commit().ok());
}

// Compares every tensor of a file that Python wrote with its companion.
void expect_values(const std::string& path) {
  auto reader = PtReader::open(path).value();
  const PtValue tensors = *reader->root().find("tensors");
  int num_compared = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string key = tensors.key(i).as_string();
    if (key.size() > 6 && key.compare(key.size() - 6, 6, ".bytes") == 0) {
      continue;
    }
    const at::Tensor tensor = reader->tensor(tensors.item(i)).value();
    const at::Tensor bytes =
        reader->tensor(*tensors.find(key + ".bytes")).value();
    EXPECT_EQ(logical_bytes(tensor), logical_bytes(bytes)) << key;
    EXPECT_EQ(python_name(tensor.scalar_type()), key.substr(0, key.find('/')));
    ++num_compared;
  }
  EXPECT_EQ(num_compared, 2 * 21 + 3);
}

TEST(InterchangeTest, EveryDtypeBothWaysBitForBit) {
  if (!have_python()) GTEST_SKIP();
  TempDir dir;
  const std::string ours = dir.file("ours.pt"), theirs = dir.file("theirs.pt");
  const std::string legacy = dir.file("legacy.pt");
  write_file(ours);
  ASSERT_EQ(
      run_python(dir.write("check.py", kScript),
                 absl::StrCat("'", ours, "' '", theirs, "' '", legacy, "'")),
      0);
  EXPECT_FALSE(PtReader::open(theirs).value()->is_legacy());
  EXPECT_TRUE(PtReader::open(legacy).value()->is_legacy());
  expect_values(theirs);
  expect_values(legacy);
  std::printf("INTERCHANGE RAN every dtype both ways\n");
}

TEST(InterchangeTest, FullStateDictOpensInPython) {
  if (!have_python()) GTEST_SKIP();
  TempDir dir;
  const std::string path = dir.file("model.pt");
  FullStateDictOptions options;
  options.module_keys = {"projector"};
  options.all_module_keys = {"projector", "llm_backbone"};
  options.names = {"projector.0.weight", "projector.0.bias",
                   "llm_backbone.llm.norm.weight"};
  auto writer = FullStateDictWriter::create(path, options).value();
  // Out of order, as units arrive.
  ASSERT_TRUE(
      writer->add("projector.0.bias", make_tensor(at::kFloat, {2})).ok());
  ASSERT_TRUE(
      writer->add("llm_backbone.llm.norm.weight", make_tensor(at::kFloat, {3}))
          .ok());
  ASSERT_TRUE(
      writer->add("projector.0.weight", make_tensor(at::kBFloat16, {2, 3}))
          .ok());
  ASSERT_TRUE(writer->commit().ok());
  const std::string script = dir.write("check.py", R"(
import collections, sys, torch
d = torch.load(sys.argv[1], weights_only=True)
assert list(d) == ["model"] and list(d["model"]) == ["projector"]
p = d["model"]["projector"]
assert type(p) is collections.OrderedDict and list(p) == ["0.weight", "0.bias"]
assert p["0.weight"].dtype == torch.bfloat16 and p["0.weight"].shape == (2, 3)
linear = torch.nn.Linear(3, 2)
torch.nn.Sequential(linear).load_state_dict(p)
)");
  EXPECT_EQ(run_python(script, absl::StrCat("'", path, "'")), 0);
  std::printf("INTERCHANGE RAN full state dict\n");
}

}  // namespace
}  // namespace fullshard
