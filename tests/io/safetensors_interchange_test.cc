// Files written here are opened by the safetensors package, and the other way
// round, with every value equal bit for bit. Needs the Python that bazelw sets
// up.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "fullshard/io/safetensors.h"
#include "fullshard/tests/io/python.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"

namespace fullshard {
namespace {

// Checks what C++ wrote, then writes what C++ will check. Every tensor `x` has
// a companion `x.bytes` with its elements' bytes in order.
constexpr char kScript[] = R"(
import sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
import os

def raw(t):
    return list(bytes(t.detach().contiguous().view(-1).untyped_storage()))

def read(path):
    tensors = {}
    with safe_open(path, "pt") as f:
        for name in f.keys():
            if f.get_slice(name).get_dtype().startswith("F6_"):
                continue  # torch has no such dtype; the package lists it only.
            tensors[name] = f.get_tensor(name)
        return tensors, f.metadata()

def check(tensors):
    names = [n for n in tensors if not n.endswith(".bytes")]
    for n in names:
        assert raw(tensors[n]) == tensors[n + ".bytes"].tolist(), n
    return len(names)

ours, theirs, folder = sys.argv[1:4]
tensors, metadata = read(ours)
assert check(tensors) == 41, len(tensors)
assert metadata == {"format": "pt", "note": "caf\u00e9 \"x\""}, metadata
assert tensors["F32.1"].shape == (5, 4) and tensors["F32.1"].dtype == torch.float32
with safe_open(ours, "pt") as f:
    assert f.get_slice("F6_E2M3").get_shape() == [4, 2]

import json
index = json.load(open(folder + "/model.safetensors.index.json"))
files = sorted(set(index["weight_map"].values()))
assert files == sorted(f for f in os.listdir(folder) if f.endswith(".safetensors"))
total = 0
for name, file in index["weight_map"].items():
    t = read(folder + "/" + file)[0][name]
    assert torch.equal(t, torch.full_like(t, int(name))), name
    total += t.numel() * t.element_size()
assert index["metadata"]["total_size"] == total

plain = {n: t.clone() for n, t in tensors.items()}
plain["odd"] = torch.tensor([1, 2, 3], dtype=torch.uint8)
plain["odd.bytes"] = torch.tensor([1, 2, 3], dtype=torch.uint8)
save_file(plain, theirs, metadata={"by": "python"})
)";

void add_all_dtypes(std::vector<SafetensorsTensor>* announced,
                    std::vector<at::Tensor>* tensors) {
  const auto add = [&](const std::string& name, at::Tensor tensor) {
    announced->push_back(
        describe_safetensors(name, tensor.scalar_type(), tensor.sizes().vec())
            .value());
    tensors->push_back(std::move(tensor));
  };
  const auto add_with_bytes = [&](const std::string& name, at::Tensor tensor) {
    const std::string bytes = logical_bytes(tensor);
    at::Tensor companion =
        at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    if (!bytes.empty()) {
      std::memcpy(companion.data_ptr(), bytes.data(), bytes.size());
    }
    add(name, std::move(tensor));
    add(name + ".bytes", std::move(companion));
  };
  for (const c10::ScalarType dtype : all_dtypes()) {
    const SafetensorsDtype* const known = find_safetensors_dtype(dtype);
    if (known == nullptr) continue;
    add_with_bytes(absl::StrCat(known->name, ".0"), make_tensor(dtype, {3, 2}));
    add_with_bytes(absl::StrCat(known->name, ".1"), make_tensor(dtype, {5, 4}));
  }
  add_with_bytes("scalar", make_tensor(at::kDouble, {}));
}

std::string write_ours(const TempDir& dir) {
  const std::string path = dir.file("ours.safetensors");
  std::vector<SafetensorsTensor> announced;
  std::vector<at::Tensor> tensors;
  add_all_dtypes(&announced, &tensors);
  const size_t count = announced.size();
  announced.push_back({"F6_E2M3", find_safetensors_dtype("F6_E2M3"), {4, 2}});
  SafetensorsWriterOptions options;
  options.metadata = {{"format", "pt"}, {"note", "caf\xc3\xa9 \"x\""}};
  auto writer = SafetensorsWriter::create(path, announced, options).value();
  for (size_t i = 0; i < count; ++i) {
    EXPECT_TRUE(writer->tensor(announced[i].name, tensors[i]).ok());
  }
  EXPECT_TRUE(writer->bytes("F6_E2M3", "123456").ok());
  EXPECT_TRUE(writer->commit().ok());
  return path;
}

std::string write_folder(const TempDir& dir) {
  SafetensorsFolderOptions options;
  options.max_shard_bytes = 100;
  std::vector<SafetensorsTensor> announced;
  for (int i = 0; i < 20; ++i) {
    announced.push_back(
        describe_safetensors(absl::StrCat(i), at::kInt, {i}).value());
  }
  auto writer =
      SafetensorsFolderWriter::create(dir.file("model"), announced, options)
          .value();
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(
        writer->tensor(absl::StrCat(i), at::full({i}, i, at::kInt)).ok());
  }
  EXPECT_TRUE(writer->commit().ok());
  return dir.file("model");
}

TEST(SafetensorsInterchangeTest, EveryDtypeBothWaysBitForBit) {
  if (!have_python()) GTEST_SKIP();
  TempDir dir;
  const std::string theirs = dir.file("theirs.safetensors");
  const std::string ours = write_ours(dir), folder = write_folder(dir);
  ASSERT_EQ(
      run_python(dir.write("check.py", kScript),
                 absl::StrCat("'", ours, "' '", theirs, "' '", folder, "'")),
      0);
  const auto reader = SafetensorsReader::open(theirs).value();
  EXPECT_EQ(reader->metadata().at("by"), "python");
  int num_compared = 0;
  for (const SafetensorsReader::Tensor& place : reader->tensors()) {
    const std::string name(place.name());
    const auto bytes = reader->tensor(name + ".bytes");
    if (!bytes.ok()) continue;  // It is such a companion itself.
    const at::Tensor tensor = reader->tensor(name).value();
    EXPECT_EQ(logical_bytes(tensor), logical_bytes(*bytes)) << name;
    ++num_compared;
  }
  EXPECT_EQ(num_compared, 2 * 20 + 2);
  std::printf("INTERCHANGE RAN every safetensors dtype both ways\n");
}

}  // namespace
}  // namespace fullshard
