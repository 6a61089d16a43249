#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "fullshard/io/pt_reader.h"
#include "fullshard/io/pt_writer.h"
#include "fullshard/io/zip_writer.h"
#include "fullshard/tests/io/fault_file_system.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"

namespace fullshard {
namespace {

using c10::ScalarType;

std::unique_ptr<PtWriter> create(const std::string& path,
                                 const PtWriterOptions& options = {}) {
  auto writer = PtWriter::create(path, options);
  EXPECT_TRUE(writer.ok()) << writer.status();
  return *std::move(writer);
}

std::unique_ptr<PtReader> open(const std::string& path) {
  auto reader = PtReader::open(path);
  EXPECT_TRUE(reader.ok()) << reader.status();
  return *std::move(reader);
}

at::Tensor read(PtReader& reader, const std::string& key) {
  const auto value = reader.root().find(key);
  EXPECT_TRUE(value.has_value()) << key;
  auto tensor = reader.tensor(*value);
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  return *std::move(tensor);
}

void write_example(const std::string& path) {
  auto writer = create(path);
  ASSERT_TRUE(writer->tensor("a", make_tensor(ScalarType::Float, {3, 5})).ok());
  ASSERT_TRUE(writer->begin_ordered_dict("nested").ok());
  ASSERT_TRUE(writer->tensor("b", make_tensor(ScalarType::BFloat16, {7})).ok());
  ASSERT_TRUE(writer->end_dict().ok());
  ASSERT_TRUE(writer->value("step", int64_t{12}).ok());
  ASSERT_TRUE(writer->commit().ok());
}

TEST(PtTest, EveryDtypeAndShapeRoundTrips) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  const std::vector<std::vector<int64_t>> shapes = {{},  {0},    {3, 0, 2},
                                                    {1}, {2, 3}, {5, 1, 1, 2}};
  {
    auto writer = create(path);
    for (const ScalarType dtype : all_dtypes()) {
      for (size_t i = 0; i < shapes.size(); ++i) {
        const std::string key = absl::StrCat(c10::toString(dtype), i);
        ASSERT_TRUE(writer->tensor(key, make_tensor(dtype, shapes[i])).ok());
      }
    }
    ASSERT_TRUE(writer->commit().ok());
  }
  auto reader = open(path);
  EXPECT_TRUE(reader->verify().ok());
  for (const ScalarType dtype : all_dtypes()) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      const at::Tensor tensor =
          read(*reader, absl::StrCat(c10::toString(dtype), i));
      EXPECT_TRUE(bit_equal(tensor, make_tensor(dtype, shapes[i])))
          << dtype << " " << i;
    }
  }
}

TEST(PtTest, ViewsAreSavedCompactly) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  const at::Tensor base = make_tensor(ScalarType::Float, {1000, 1000});
  const at::Tensor transposed =
      make_tensor(ScalarType::Float, {4, 6}).transpose(0, 1);
  {
    auto writer = create(path);
    ASSERT_TRUE(writer->tensor("slice", base.narrow(0, 5, 2)).ok());
    ASSERT_TRUE(writer->tensor("column", base.select(1, 3)).ok());
    ASSERT_TRUE(
        writer->tensor("expanded", base.select(0, 0).select(0, 0).expand({50}))
            .ok());
    ASSERT_TRUE(writer->tensor("transposed", transposed).ok());
    ASSERT_TRUE(writer->commit().ok());
  }
  EXPECT_LT(read_file(path).size(), 20000u);
  auto reader = open(path);
  EXPECT_TRUE(bit_equal(read(*reader, "slice"), base.narrow(0, 5, 2)));
  EXPECT_TRUE(bit_equal(read(*reader, "column"), base.select(1, 3)));
  EXPECT_TRUE(bit_equal(read(*reader, "transposed"), transposed));
  EXPECT_EQ(read(*reader, "transposed").strides(), transposed.strides());
  EXPECT_EQ(read(*reader, "expanded").numel(), 50);
}

TEST(PtTest, TiedTensorsAreSavedOnce) {
  TempDir dir;
  const at::Tensor weight = make_tensor(ScalarType::Float, {100, 100});
  for (const bool share : {true, false}) {
    const std::string path = dir.file("a.pt");
    PtWriterOptions options;
    options.share_storages = share;
    auto writer = create(path, options);
    ASSERT_TRUE(writer->tensor("embedding", weight).ok());
    ASSERT_TRUE(writer->tensor("head", weight.transpose(0, 1)).ok());
    ASSERT_TRUE(writer->tensor("row", weight.select(0, 7)).ok());
    ASSERT_TRUE(writer->commit().ok());
    EXPECT_EQ(read_file(path).size() < 50000, share);

    auto reader = open(path);
    at::Tensor embedding = read(*reader, "embedding");
    EXPECT_TRUE(bit_equal(read(*reader, "head"), weight.transpose(0, 1)));
    EXPECT_TRUE(bit_equal(read(*reader, "row"), weight.select(0, 7)));
    EXPECT_EQ(embedding.storage().is_alias_of(read(*reader, "head").storage()),
              share);
  }
}

TEST(PtTest, FreedStoragesAreNotTakenForOthers) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  {
    auto writer = create(path);
    for (unsigned i = 0; i < 50; ++i) {
      ASSERT_TRUE(
          writer
              ->tensor(absl::StrCat(i), make_tensor(ScalarType::Float, {16}, i))
              .ok());
    }
    ASSERT_TRUE(writer->commit().ok());
  }
  auto reader = open(path);
  for (unsigned i = 0; i < 50; ++i) {
    EXPECT_TRUE(bit_equal(read(*reader, absl::StrCat(i)),
                          make_tensor(ScalarType::Float, {16}, i)));
  }
}

TEST(PtTest, TensorsOutliveTheReaderAndNeverWriteToTheFile) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  write_example(path);
  const std::string before = read_file(path);
  at::Tensor tensor = read(*open(path), "a");
  *static_cast<float*>(tensor.data_ptr()) = 42;
  EXPECT_EQ(*static_cast<const float*>(tensor.const_data_ptr()), 42);
  EXPECT_TRUE(read_file(path) == before);
}

TEST(PtTest, ScalarsAndNestedDictsRoundTrip) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  {
    auto writer = create(path);
    ASSERT_TRUE(writer->value("none", {}).ok());
    ASSERT_TRUE(writer->value("flag", true).ok());
    ASSERT_TRUE(writer->value("step", int64_t{-5}).ok());
    ASSERT_TRUE(writer->value("loss", 0.25).ok());
    ASSERT_TRUE(writer->value("name", "caf\xc3\xa9").ok());
    ASSERT_TRUE(writer->begin_dict("outer").ok());
    ASSERT_TRUE(writer->begin_ordered_dict("inner/.x").ok());
    ASSERT_TRUE(writer->end_dict().ok());
    ASSERT_TRUE(writer->end_dict().ok());
    ASSERT_TRUE(writer->commit().ok());
  }
  const PtValue root = open(path)->root();
  EXPECT_EQ(root.find("none")->kind(), PtKind::kNone);
  EXPECT_TRUE(root.find("flag")->as_bool());
  EXPECT_EQ(root.find("step")->as_int(), -5);
  EXPECT_EQ(root.find("loss")->as_float(), 0.25);
  EXPECT_EQ(root.find("name")->as_string(), "caf\xc3\xa9");
  EXPECT_EQ(root.find("outer")->find("inner/.x")->kind(), PtKind::kOrderedDict);
}

TEST(PtTest, TenThousandTensors) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  const at::Tensor one = make_tensor(ScalarType::Float, {1});
  {
    PtWriterOptions options;
    options.share_storages = false;
    auto writer = create(path, options);
    for (int i = 0; i < 10000; ++i) {
      ASSERT_TRUE(writer->tensor(absl::StrCat("layer.", i), one).ok());
    }
    ASSERT_TRUE(writer->commit().ok());
  }
  auto reader = open(path);
  ASSERT_EQ(reader->root().size(), 10000u);
  EXPECT_TRUE(bit_equal(*reader->tensor(reader->root().item(9999)), one));
}

TEST(PtTest, WrongUseIsAnError) {
  TempDir dir;
  const at::Tensor tensor = make_tensor(ScalarType::Float, {1});
  const auto code = [&](auto use) {
    return use(*create(dir.file("a.pt"))).code();
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([&](PtWriter& writer) {
              (void)writer.tensor("a", tensor);
              return writer.tensor("a", tensor);
            }),
            invalid);
  EXPECT_EQ(code([](PtWriter& writer) { return writer.end_dict(); }), invalid);
  EXPECT_EQ(code([](PtWriter& writer) {
              (void)writer.begin_dict("a");
              return writer.commit();
            }),
            invalid);
  EXPECT_EQ(code([](PtWriter& writer) { return writer.value("\xff", {}); }),
            invalid);
  EXPECT_EQ(code([](PtWriter& writer) { return writer.tensor("a", {}); }),
            invalid);
  EXPECT_EQ(code([](PtWriter& writer) {
              return writer.tensor(
                  "a", at::empty({2}, at::TensorOptions().device(c10::kMeta)));
            }),
            invalid);
  EXPECT_TRUE(dir.names().empty());
}

TEST(PtTest, EveryFailingCallLeavesTheOldFile) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  write_example(path);
  const std::string old = read_file(path);
  const at::Tensor large = make_tensor(ScalarType::Float, {1 << 20});
  FaultFileSystem file_system;
  PtWriterOptions options;
  options.file_system = &file_system;
  bool saved = false;
  for (int call = 0; !saved; ++call) {
    file_system.fail_at = call;
    file_system.num_calls = 0;
    auto writer = PtWriter::create(path, options);
    if (!writer.ok()) continue;
    saved = (*writer)->tensor("new", large).ok() && (*writer)->commit().ok();
    writer->reset();
    EXPECT_EQ(dir.names().size(), 1u);
    const bool renamed = read_file(path) != old;
    EXPECT_TRUE(!saved || renamed);
    EXPECT_TRUE(open(path)->root().find(renamed ? "new" : "a").has_value());
    ASSERT_LT(call, 100);
  }
}

TEST(PtTest, WhatIsNoCheckpointIsNamed) {
  TempDir dir;
  const std::string safetensors =
      std::string("\x02\0\0\0\0\0\0\0", 8) + "{}" + std::string(8, ' ');
  const std::string legacy(
      "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20j\xa8P\x19.\x80\x02M\xe9\x03.", 20);
  const std::pair<const char*, std::string> cases[] = {
      {"is empty", ""},
      {"Git-LFS pointer", "version https://git-lfs.github.com/spec/v1\n"},
      {"web page", "\n<!DOCTYPE html><html>"},
      {"safetensors", safetensors},
      {"cut short", legacy},
      {"cut short", "PK"},
      {"cut short", std::string("PK\x03\x04", 4) + std::string(100, 'x')},
      {"not a checkpoint", "hello"}};
  for (const auto& [expected, bytes] : cases) {
    const std::string path = dir.write("a.pt", bytes);
    const absl::Status status = PtReader::open(path).status();
    EXPECT_NE(status.message().find(expected), std::string::npos) << status;
    EXPECT_NE(status.message().find(path), std::string::npos) << status;
  }
  EXPECT_NE(PtReader::open(dir.file("")).status().message().find("folder"),
            std::string::npos);
  EXPECT_EQ(PtReader::open(dir.file("none")).status().code(),
            absl::StatusCode::kNotFound);
}

// An archive that holds `entries`.
std::string write_archive(
    const TempDir& dir,
    const std::vector<std::pair<std::string, std::string>>& entries) {
  const std::string path = dir.file("archive.pt");
  auto file = AtomicFile::create(path);
  ZipWriter zip((*file)->sink());
  for (const auto& [name, bytes] : entries) {
    EXPECT_TRUE(zip.add(name, bytes).ok());
  }
  EXPECT_TRUE(zip.finish().ok());
  EXPECT_TRUE((*file)->commit().ok());
  return path;
}

TEST(PtTest, ForeignArchivesAreNamed) {
  TempDir dir;
  const std::string pickle("\x80\x02}.", 4);
  const auto message =
      [&](std::vector<std::pair<std::string, std::string>> entries) {
        return std::string(
            PtReader::open(write_archive(dir, entries)).status().message());
      };
  EXPECT_NE(message({{"m/data.pkl", pickle}, {"m/constants.pkl", pickle}})
                .find("TorchScript"),
            std::string::npos);
  EXPECT_NE(message({{"word/document.xml", "x"}}).find("without data.pkl"),
            std::string::npos);
  EXPECT_NE(message({{"m/data.pkl", pickle}, {"m/byteorder", "big"}})
                .find("byte order"),
            std::string::npos);
  EXPECT_NE(message({{"m/data.pkl",
                      "\x80\x02"
                      "cos\nsystem\nU\x01"
                      "aR."}})
                .find("refused to load \"os.system\""),
            std::string::npos);
  EXPECT_EQ(message({{"m/data.pkl", pickle}}), "");
}

TEST(PtTest, MissingOrShortStorageIsAnError) {
  TempDir dir;
  PickledTensor pickled;
  pickled.storage_key = "0";
  pickled.storage_bytes = 8;
  pickled.sizes = {2};
  pickled.strides = {1};
  PickleWriter pickle;
  pickle.tensor(pickled);
  const std::string bytes = pickle.finish();
  auto missing = open(write_archive(dir, {{"m/data.pkl", bytes}}));
  EXPECT_EQ(missing->tensor(missing->root()).status().code(),
            absl::StatusCode::kDataLoss);
  auto cut = open(
      write_archive(dir, {{"m/data.pkl", bytes}, {"m/data/0", "1234567"}}));
  EXPECT_EQ(cut->tensor(cut->root()).status().code(),
            absl::StatusCode::kDataLoss);
}

// Reads all that `path` lets read.
void touch_everything(const std::string& path) {
  auto reader = PtReader::open(path);
  if (!reader.ok()) return;
  const PtValue& root = (*reader)->root();
  for (size_t i = 0; i < root.size(); ++i) {
    if (!root.item(i).is_tensor()) continue;
    const auto tensor = (*reader)->tensor(root.item(i));
    if (tensor.ok() && tensor->numel() < 1000) (void)logical_bytes(*tensor);
  }
}

TEST(PtTest, EveryTruncationIsAnError) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  write_example(path);
  for (size_t size = read_file(path).size(); size-- > 0;) {
    std::filesystem::resize_file(path, size);
    ASSERT_FALSE(PtReader::open(path).ok()) << size;
  }
}

TEST(PtTest, RandomFlipsNeverCrash) {
  TempDir dir;
  const std::string path = dir.file("a.pt");
  write_example(path);
  const std::string good = read_file(path);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  std::mt19937 random(1);
  for (int trial = 0; trial < 5000; ++trial) {
    const size_t at = random() % good.size();
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(random()));
    file.flush();
    touch_everything(path);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(good[at]);
    file.flush();
  }
  EXPECT_TRUE(open(path)->verify().ok());
}

}  // namespace
}  // namespace fullshard
