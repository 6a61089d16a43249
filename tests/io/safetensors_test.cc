#include "fullshard/io/safetensors.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"

namespace fullshard {
namespace {

using c10::ScalarType;

SafetensorsTensor describe(const std::string& name, ScalarType dtype,
                           std::vector<int64_t> sizes) {
  return describe_safetensors(name, dtype, std::move(sizes)).value();
}

// Header and data as they stand in a file.
std::string file_bytes(const std::string& header, size_t data_bytes) {
  std::string out;
  for (size_t i = 0; i < 8; ++i) {
    out.push_back(static_cast<char>(header.size() >> (8 * i)));
  }
  return out + header + std::string(data_bytes, 'x');
}

std::string error_of(const TempDir& dir, const std::string& bytes) {
  const std::string path = dir.write("a.safetensors", bytes);
  const absl::Status status = SafetensorsFile::open(path).status();
  if (status.ok()) return "";
  EXPECT_NE(status.message().find(path), std::string::npos) << status;
  return std::string(status.message());
}

TEST(SafetensorsTest, EveryDtypeAndShapeRoundTrips) {
  TempDir dir;
  const std::string path = dir.file("a.safetensors");
  const std::vector<std::vector<int64_t>> shapes = {
      {0}, {3, 0, 2}, {1}, {5, 3}};
  std::vector<SafetensorsTensor> announced;
  std::vector<at::Tensor> tensors;
  for (const ScalarType dtype : all_dtypes()) {
    if (find_safetensors_dtype(dtype) == nullptr) continue;
    for (size_t i = 0; i < shapes.size(); ++i) {
      announced.push_back(describe(absl::StrCat(c10::toString(dtype), ".", i),
                                   dtype, shapes[i]));
      tensors.push_back(make_tensor(dtype, shapes[i]));
    }
  }
  ASSERT_EQ(announced.size(), 20 * shapes.size());
  announced.push_back(describe("scalar", ScalarType::Float, {}));
  tensors.push_back(make_tensor(ScalarType::Float, {}));
  auto writer = SafetensorsWriter::create(path, announced).value();
  for (size_t i = announced.size(); i-- > 0;) {
    ASSERT_TRUE(writer->tensor(announced[i].name, tensors[i]).ok());
  }
  ASSERT_TRUE(writer->commit().ok());
  const auto reader = SafetensorsReader::open(path).value();
  ASSERT_EQ(reader->tensors().size(), announced.size());
  for (size_t i = 0; i < announced.size(); ++i) {
    const at::Tensor read = reader->tensor(announced[i].name).value();
    EXPECT_TRUE(bit_equal(read, tensors[i])) << announced[i].name;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(read.const_data_ptr()) %
                  read.element_size(),
              0u);
  }
}

TEST(SafetensorsTest, SixBitFloatsPassAsBytes) {
  TempDir dir;
  const std::string path = dir.file("a.safetensors");
  const auto* dtype = find_safetensors_dtype("F6_E2M3");
  auto writer = SafetensorsWriter::create(path, {{"a", dtype, {4, 2}}}).value();
  ASSERT_TRUE(writer->bytes("a", "123456").ok());
  ASSERT_TRUE(writer->commit().ok());
  const auto file = SafetensorsFile::open(path).value();
  EXPECT_EQ(file->bytes(0), "123456");
  EXPECT_EQ(file->shape(0), (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(file->tensor(0).status().code(), absl::StatusCode::kUnimplemented);
}

TEST(SafetensorsTest, ViewsAreWrittenContiguous) {
  TempDir dir;
  const std::string path = dir.file("a.safetensors");
  const at::Tensor view =
      make_tensor(ScalarType::Float, {4, 6}).t().slice(0, 1, 5, 2);
  auto writer = SafetensorsWriter::create(
                    path, {describe("a", ScalarType::Float, {2, 4})})
                    .value();
  ASSERT_TRUE(writer->tensor("a", view).ok());
  ASSERT_TRUE(writer->commit().ok());
  EXPECT_TRUE(
      bit_equal(*SafetensorsReader::open(path).value()->tensor("a"), view));
}

TEST(SafetensorsTest, OddNamesAndMetadataAreKept) {
  TempDir dir;
  const std::string path = dir.file("a.safetensors");
  const std::vector<std::string> names = {"a/b.c",       "",
                                          "caf\xc3\xa9", "quote\"back\\slash",
                                          "line\nbreak", "\xf0\x9f\x98\x80"};
  SafetensorsWriterOptions options;
  options.metadata = {{"format", "pt"}, {"\"", "a\tb"}};
  std::vector<SafetensorsTensor> announced;
  for (const std::string& name : names) {
    announced.push_back(describe(name, ScalarType::Byte, {1}));
  }
  auto writer = SafetensorsWriter::create(path, announced, options).value();
  for (size_t i = 0; i < names.size(); ++i) {
    ASSERT_TRUE(
        writer->bytes(names[i], std::string(1, static_cast<char>(i))).ok());
  }
  ASSERT_TRUE(writer->commit().ok());
  const auto reader = SafetensorsReader::open(path).value();
  EXPECT_EQ(reader->metadata(), options.metadata);
  for (size_t i = 0; i < names.size(); ++i) {
    const auto place = reader->find(names[i]);
    ASSERT_TRUE(place.has_value()) << names[i];
    EXPECT_EQ(place->file->bytes(place->number)[0], static_cast<char>(i));
  }
}

TEST(SafetensorsTest, BadHeadersAreNamed) {
  TempDir dir;
  const auto header = [](const std::string& entries) {
    return file_bytes("{" + entries + "}", 8);
  };
  const std::string good =
      R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_EQ(error_of(dir, header(good)), "");
  const std::pair<const char*, std::string> cases[] = {
      {"empty", ""},
      {"at least 8", "1234567"},
      {"at most 100000000", std::string("\xff\xff\xff\xff\0\0\0\0{", 9)},
      {"cut short", file_bytes("{}", 0).substr(0, 9)},
      {"does not start", file_bytes(" {}", 0)},
      {"appears twice", header(good + "," + good)},
      {"appears twice",
       header(R"("\u0061":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)" +
              good)},
      {"overlaps",
       header(R"("a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},)"
              R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]})")},
      {"hole",
       header(R"("a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
              R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]})")},
      {"hole",
       header(R"("a":{"dtype":"U8","shape":[7],"data_offsets":[1,8]})")},
      {"left over",
       header(R"("a":{"dtype":"U8","shape":[7],"data_offsets":[0,7]})")},
      {"cut short",
       header(R"("a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]})")},
      {"expected 12 bytes",
       header(R"("a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]})")},
      {"inside a byte",
       header(R"("a":{"dtype":"F6_E3M2","shape":[9],"data_offsets":[0,8]})")},
      {"too large",
       header(
           R"("a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]})")},
      {"unknown dtype",
       header(R"("a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]})")},
      {"bad shape",
       header(R"("a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]})")},
      {"bad shape",
       header(R"("a":{"dtype":"F32","shape":{},"data_offsets":[0,8]})")},
      {"unexpected key",
       header(
           R"("a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]})")},
      {"lacks", header(R"("a":{"dtype":"F32","data_offsets":[0,8]})")},
      {"63 bits",
       header(
           R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,99999999999999999999]})")},
      {"metadata", header(R"("__metadata__":{"k":"1","k":"2"})")},
      {"malformed JSON", header(R"("__metadata__":{"k":1})")},
      {"malformed JSON", header(good + ",")},
      {"malformed JSON", file_bytes("{} x", 0)},
      {"not UTF-8", header("\"\xff\":{}")},
      {"bad escape", header(R"("\q":{})")},
      {"Git-LFS", "version https://git-lfs.github.com/spec/v1\n"},
      {"web page", "<html>"},
      {"ZIP archive", std::string("PK\x03\x04", 4) + std::string(99, 'x')}};
  for (const auto& [expected, bytes] : cases) {
    EXPECT_NE(error_of(dir, bytes).find(expected), std::string::npos)
        << expected << ": " << error_of(dir, bytes);
  }
}

TEST(SafetensorsTest, FilesAlignedByOthersAreCopied) {
  TempDir dir;
  const std::string bytes = file_bytes(
      R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})",
      9);
  const auto reader =
      SafetensorsReader::open(dir.write("a.safetensors", bytes)).value();
  const at::Tensor a = reader->tensor("a").value();
  EXPECT_EQ(logical_bytes(a), "xxxxxxxx");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.const_data_ptr()) % 4, 0u);
}

TEST(SafetensorsTest, WrongUseOfTheWriterIsAnError) {
  TempDir dir;
  const auto code =
      [&](const std::function<absl::Status(SafetensorsWriter&)>& use) {
        auto writer = SafetensorsWriter::create(
            dir.file("a"), {describe("a", ScalarType::Float, {2})});
        return use(**writer).code();
      };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const auto tensor = [](std::vector<int64_t> sizes,
                         ScalarType dtype = ScalarType::Float) {
    return make_tensor(dtype, std::move(sizes));
  };
  EXPECT_EQ(code([&](auto& w) { return w.tensor("b", tensor({2})); }), invalid);
  EXPECT_EQ(code([&](auto& w) { return w.tensor("a", tensor({3})); }), invalid);
  EXPECT_EQ(code([&](auto& w) { return w.tensor("a", tensor({2}, at::kInt)); }),
            invalid);
  EXPECT_EQ(code([&](auto& w) { return w.tensor("a", {}); }), invalid);
  EXPECT_EQ(code([&](auto& w) { return w.bytes("a", "123"); }), invalid);
  EXPECT_EQ(code([&](auto& w) {
              (void)w.tensor("a", tensor({2}));
              return w.tensor("a", tensor({2}));
            }),
            invalid);
  EXPECT_EQ(code([&](auto& w) { return w.commit(); }),
            absl::StatusCode::kFailedPrecondition);
  const auto twice = describe("a", ScalarType::Float, {2});
  EXPECT_EQ(
      SafetensorsWriter::create(dir.file("a"), {twice, twice}).status().code(),
      invalid);
  EXPECT_EQ(
      describe_safetensors("a", ScalarType::ComplexDouble, {}).status().code(),
      invalid);
  EXPECT_TRUE(dir.names().empty());
}

void write_folder(const std::string& path, int num_tensors, int64_t max_bytes) {
  SafetensorsFolderOptions options;
  options.max_shard_bytes = max_bytes;
  std::vector<SafetensorsTensor> announced;
  for (int i = 0; i < num_tensors; ++i) {
    announced.push_back(describe(absl::StrCat("t", i), ScalarType::Int, {i}));
  }
  auto writer =
      SafetensorsFolderWriter::create(path, announced, options).value();
  for (int i = num_tensors; i-- > 0;) {
    ASSERT_TRUE(writer
                    ->tensor(absl::StrCat("t", i),
                             make_tensor(ScalarType::Int, {i},
                                         static_cast<unsigned>(i)))
                    .ok());
  }
  ASSERT_TRUE(writer->add_file("config.json", "{}").ok());
  EXPECT_FALSE(std::filesystem::exists(path));
  ASSERT_TRUE(writer->commit().ok());
}

TEST(SafetensorsFolderTest, SplitsByBytesAndReadsByName) {
  TempDir dir;
  const std::string path = dir.file("model");
  write_folder(path, 10, 40);  // t0..t4: 40 bytes, t5 20, t6 24, ... alone
  EXPECT_EQ(dir.names(), std::vector<std::string>{"model"});
  const auto reader = SafetensorsReader::open(path + "/").value();
  ASSERT_EQ(reader->tensors().size(), 10u);
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(
        bit_equal(*reader->tensor(absl::StrCat("t", i)),
                  make_tensor(ScalarType::Int, {i}, static_cast<unsigned>(i))));
    EXPECT_EQ(reader->tensors()[static_cast<size_t>(i)].name(),
              absl::StrCat("t", i));
  }
  EXPECT_TRUE(
      std::filesystem::exists(path + "/model-00001-of-00006.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(path + "/model.safetensors.index.json"));
  EXPECT_EQ(read_file(path + "/config.json"), "{}");
  EXPECT_EQ(reader->metadata().at("format"), "pt");
}

TEST(SafetensorsFolderTest, OneFileHasNoIndex) {
  TempDir dir;
  write_folder(dir.file("model"), 3, 1000);
  EXPECT_TRUE(std::filesystem::exists(dir.file("model/model.safetensors")));
  EXPECT_FALSE(
      std::filesystem::exists(dir.file("model/model.safetensors.index.json")));
  write_folder(dir.file("none"), 0, 1000);
  EXPECT_TRUE(
      SafetensorsReader::open(dir.file("none")).value()->tensors().empty());
}

TEST(SafetensorsFolderTest, TakenNameIsAnErrorAndStays) {
  TempDir dir;
  write_folder(dir.file("model"), 3, 1000);
  EXPECT_EQ(
      SafetensorsFolderWriter::create(dir.file("model"), {}).status().code(),
      absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(dir.names(), std::vector<std::string>{"model"});
}

TEST(SafetensorsFolderTest, BadIndexIsNamed) {
  TempDir dir;
  write_folder(dir.file("m"), 3, 8);
  const std::string shard = "model-00001-of-00002.safetensors";
  const std::string index = dir.file("m/model.safetensors.index.json");
  const auto error = [&](const std::string& json) {
    std::ofstream(index) << json;
    return std::string(
        SafetensorsReader::open(dir.file("m")).status().message());
  };
  const auto map = [&](const std::string& entries) {
    return "{\"weight_map\":{" + entries + "}}";
  };
  EXPECT_EQ(error(map("\"t1\":\"" + shard + "\"")), "");
  const std::pair<const char*, std::string> cases[] = {
      {"weight_map is missing", "{}"},
      {"malformed JSON", "{\"weight_map\":[]}"},
      {"malformed JSON", "{"},
      {"is not in", map("\"t7\":\"" + shard + "\"")},
      {"appears twice",
       map("\"t1\":\"" + shard + "\",\"t1\":\"" + shard + "\"")},
      {"plain file name", map("\"t1\":\"../m/" + shard + "\"")},
      {"plain file name", map("\"t1\":\"..\"")},
      {"cannot open", map("\"t1\":\"x.safetensors\"")}};
  for (const auto& [expected, json] : cases) {
    EXPECT_NE(error(json).find(expected), std::string::npos) << error(json);
    EXPECT_NE(error(json).find(index), std::string::npos) << error(json);
  }
  EXPECT_EQ(SafetensorsReader::open(dir.file("")).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(SafetensorsTest, TenThousandTensors) {
  TempDir dir;
  const std::string path = dir.file("a.safetensors");
  std::vector<SafetensorsTensor> announced;
  for (int i = 0; i < 10000; ++i) {
    announced.push_back(
        describe(absl::StrCat("layer.", i), ScalarType::Int, {1}));
  }
  auto writer = SafetensorsWriter::create(path, announced).value();
  for (int i = 0; i < 10000; ++i) {
    ASSERT_TRUE(writer
                    ->bytes(announced[static_cast<size_t>(i)].name,
                            {reinterpret_cast<const char*>(&i), sizeof(i)})
                    .ok());
  }
  ASSERT_TRUE(writer->commit().ok());
  const auto reader = SafetensorsReader::open(path).value();
  EXPECT_EQ(
      *static_cast<const int*>(reader->tensor("layer.9999")->const_data_ptr()),
      9999);
}

TEST(SafetensorsTest, TensorOverFourGibibytesInASparseFile) {
  TempDir dir;
  const int64_t size = (int64_t{4} << 30) + 5;
  const std::string path =
      dir.write("a.safetensors",
                file_bytes(absl::StrCat(R"({"a":{"dtype":"U8","shape":[)", size,
                                        R"(],"data_offsets":[0,)", size, "]}}"),
                           0));
  const auto header_bytes = std::filesystem::file_size(path);
  std::filesystem::resize_file(path,
                               header_bytes + static_cast<uintmax_t>(size) - 1);
  { std::ofstream(path, std::ios::app | std::ios::binary) << 'z'; }
  const at::Tensor tensor =
      SafetensorsReader::open(path).value()->tensor("a").value();
  EXPECT_EQ(tensor.numel(), size);
  EXPECT_EQ(static_cast<const char*>(tensor.const_data_ptr())[size - 1], 'z');
}

TEST(SafetensorsTest, FileCutShortUnderAReaderIsAnError) {
  TempDir dir;
  const std::string path = dir.write(
      "a.safetensors",
      file_bytes(
          R"({"a":{"dtype":"U8","shape":[99999],"data_offsets":[0,99999]}})",
          99999));
  const auto reader = SafetensorsReader::open(path).value();
  std::filesystem::resize_file(path, 100);
  const absl::Status status = reader->tensor("a").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("cut short while it was read"),
            std::string::npos);
}

}  // namespace
}  // namespace fullshard
