// Files that others wrote are read here as the original libraries read them:
// Python lists each tensor's name, dtype, shape and SHA-256, and so do we.

#include "fullshard/tests/io/public_checkpoints.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "fullshard/io/pt_reader.h"
#include "fullshard/io/safetensors.h"
#include "fullshard/tests/io/python.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"

namespace fullshard {
namespace {

// Writes every tensor's name, type, shape and bytes, one file after the other.
constexpr char kScript[] = R"(
import sys, torch
from safetensors.torch import load_file
out = open(sys.argv[1], "wb")
for path in sys.argv[2:]:
    if path.endswith(".safetensors"):
        tensors = load_file(path)
    else:
        tensors = torch.load(path, weights_only=True, map_location="cpu")
    for name in sorted(tensors):
        t = tensors[name].detach().contiguous()
        shape = ",".join(map(str, t.shape))
        out.write(f"{name} {str(t.dtype)[6:]} [{shape}]\n".encode())
        out.write(t.view(-1).view(torch.uint8).numpy().tobytes())
)";

std::string dump(const std::map<std::string, at::Tensor>& tensors) {
  std::string out;
  for (const auto& [name, tensor] : tensors) {
    std::string dtype = tensor.scalar_type() == at::kFloat  ? "float32"
                        : tensor.scalar_type() == at::kLong ? "int64"
                                                            : "?";
    absl::StrAppend(&out, name, " ", dtype, " [",
                    absl::StrJoin(tensor.sizes(), ","), "]\n");
    if (tensor.is_contiguous()) {
      out.append(static_cast<const char*>(tensor.const_data_ptr()),
                 tensor.nbytes());
    } else {
      out += logical_bytes(tensor);
    }
  }
  return out;
}

std::map<std::string, at::Tensor> read_pt(const std::string& path) {
  const auto opened = PtReader::open(path);
  EXPECT_TRUE(opened.ok()) << opened.status();
  std::map<std::string, at::Tensor> tensors;
  if (!opened.ok()) return tensors;
  PtReader& reader = **opened;
  EXPECT_TRUE(reader.verify().ok());
  for (size_t i = 0; i < reader.root().size(); ++i) {
    const auto tensor = reader.tensor(reader.root().item(i));
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    if (tensor.ok()) tensors[reader.root().key(i).as_string()] = *tensor;
  }
  return tensors;
}

std::map<std::string, at::Tensor> read_safetensors(const std::string& path) {
  const auto reader = SafetensorsReader::open(path);
  EXPECT_TRUE(reader.ok()) << reader.status();
  std::map<std::string, at::Tensor> tensors;
  if (!reader.ok()) return tensors;
  for (const SafetensorsReader::Tensor& place : (*reader)->tensors()) {
    const std::string name(place.name());
    tensors[name] = (*reader)->tensor(name).value();
  }
  return tensors;
}

// True if Python reads the same from `paths` as `ours`, their dumps in a row.
void expect_python_agrees(const std::vector<std::string>& paths,
                          const std::string& ours) {
  TempDir dir;
  std::string arguments = absl::StrCat("'", dir.file("dump"), "'");
  for (const std::string& path : paths) {
    absl::StrAppend(&arguments, " '", path, "'");
  }
  ASSERT_EQ(run_python(dir.write("dump.py", kScript), arguments), 0);
  EXPECT_TRUE(read_file(dir.file("dump")) == ours);
}

TEST(PublicCheckpointsTest, LegacyFilesOfPython3AndPython2) {
  if (!have_public_checkpoints() || !have_python()) GTEST_SKIP();
  std::vector<std::string> paths;
  std::string ours;
  size_t num_tensors = 0;
  for (const auto& names : {legacy_checkpoints(), python2_checkpoints()}) {
    for (const std::string& name : names) {
      paths.push_back(public_checkpoint(name));
      const auto tensors = read_pt(paths.back());
      num_tensors += tensors.size();
      ours += dump(tensors);
      EXPECT_TRUE(PtReader::open(paths.back()).value()->is_legacy());
    }
  }
  EXPECT_EQ(num_tensors, 13u + 16u + 21u + 2 * (5u + 5u + 7u));
  expect_python_agrees(paths, ours);
  std::printf("INTERCHANGE RAN %zu legacy tensors\n", num_tensors);
}

TEST(PublicCheckpointsTest, ZipFiles) {
  if (!have_public_checkpoints() || !have_python()) GTEST_SKIP();
  const std::string tiny = public_checkpoint(kZipCheckpoint);
  const std::string full = public_checkpoint(kLargeZipCheckpoint);
  const auto tensors = read_pt(tiny);
  EXPECT_EQ(tensors.size(), 44u);
  expect_python_agrees({tiny, full},
                       absl::StrCat(dump(tensors), dump(read_pt(full))));
}

TEST(PublicCheckpointsTest, SafetensorsFiles) {
  if (!have_public_checkpoints() || !have_python()) GTEST_SKIP();
  const std::string small = public_checkpoint(kSafetensorsCheckpoint);
  const std::string folder = public_checkpoint(kLargeSafetensorsFolder);
  const auto tensors = read_safetensors(folder);
  EXPECT_EQ(tensors.size(), 104u);
  expect_python_agrees(
      {small, folder + "/model.safetensors"},
      absl::StrCat(dump(read_safetensors(small)), dump(tensors)));
}

TEST(PublicCheckpointsTest, TorchScriptIsRecognised) {
  if (!have_public_checkpoints()) GTEST_SKIP();
  const absl::Status status =
      PtReader::open(public_checkpoint(kTorchScript)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_NE(status.message().find("TorchScript"), std::string::npos) << status;
}

}  // namespace
}  // namespace fullshard
