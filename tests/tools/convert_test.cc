#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "fullshard/io/checkpoint_reader.h"
#include "fullshard/io/full_state_dict.h"
#include "fullshard/io/pt_writer.h"
#include "fullshard/io/safetensors.h"
#include "fullshard/io/sharded_checkpoint_writer.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/io/tensors.h"
#include "fullshard/tools/checkpoint_listing.h"
#include "fullshard/tools/convert_checkpoint.h"
#include "nlohmann/json.hpp"

namespace fullshard {
namespace {

using c10::ScalarType;

ConvertReport convert(const std::string& input, const std::string& output,
                      const ConvertOptions& options = {}) {
  const auto report = convert_checkpoint(input, output, options);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *report : ConvertReport();
}

std::unique_ptr<CheckpointReader> open(const std::string& path) {
  auto reader = open_checkpoint(path);
  EXPECT_TRUE(reader.ok()) << reader.status();
  return *std::move(reader);
}

// Sharded checkpoints have the model's tensors in a dict of their own.
std::string plain_name(const CheckpointReader& reader, size_t i) {
  const std::string& name = reader.tensors()[i].name;
  return std::string(
      absl::StripPrefix(name, reader.format() == "sharded" ? "model." : ""));
}

void expect_same_tensors(const std::string& a, const std::string& b) {
  const auto left = open(a), right = open(b);
  ASSERT_EQ(left->tensors().size(), right->tensors().size());
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < right->tensors().size(); ++i) {
    places[plain_name(*right, i)] = i;
  }
  for (size_t i = 0; i < left->tensors().size(); ++i) {
    const std::string name = plain_name(*left, i);
    ASSERT_EQ(places.count(name), 1u) << name;
    EXPECT_TRUE(bit_equal(*left->tensor(i), *right->tensor(places[name])))
        << name;
  }
}

// A dict of every dtype that safetensors has, a view, a tied pair and values.
std::string write_example(const TempDir& dir) {
  const std::string path = dir.file("example.pt");
  auto writer = PtWriter::create(path).value();
  for (const ScalarType dtype : all_dtypes()) {
    if (find_safetensors_dtype(dtype) == nullptr) continue;
    EXPECT_TRUE(
        writer->tensor(c10::toString(dtype), make_tensor(dtype, {3, 2})).ok());
  }
  const at::Tensor base = make_tensor(ScalarType::Float, {4, 6});
  EXPECT_TRUE(writer->tensor("odd/\xc3\xa9.name", base.t()).ok());
  EXPECT_TRUE(writer->tensor("tied", base).ok());
  EXPECT_TRUE(writer->tensor("tied_again", base).ok());
  EXPECT_TRUE(writer->value("step", int64_t{7}).ok());
  EXPECT_TRUE(writer->commit().ok());
  return path;
}

TEST(ConvertTest, EveryFormatToEveryOther) {
  TempDir dir;
  const std::string example = write_example(dir);
  const std::string formats[] = {"a.pt", "a.safetensors", "folder",
                                 "step-000007"};
  for (const std::string& first : formats) {
    const std::string middle = dir.file("1" + first);
    ConvertOptions options;
    options.max_shard_bytes = 100;
    EXPECT_EQ(convert(example, middle, options).num_tensors, 23u);
    expect_same_tensors(example, middle);
    EXPECT_FALSE(convert_checkpoint(example, middle, options).ok() &&
                 std::filesystem::is_directory(middle));
    for (const std::string& second : formats) {
      const std::string last = dir.file(absl::StrCat("2", first, second));
      convert(middle, last, options);
      expect_same_tensors(example, last);
    }
  }
}

// What all ranks of a job wrote: the model is taken, with its tied names.
TEST(ConvertTest, ShardedCheckpointsAreRead) {
  TempDir dir;
  const std::string folder = dir.file("step-000001");
  ASSERT_TRUE(ShardedCheckpointWriter::prepare(folder).ok());
  const at::Tensor values = make_tensor(ScalarType::Float, {3, 4});
  std::vector<ShardToSave> shards(2);
  shards[0].path = {"model", "llm.weight"};
  shards[0].aliases = {{"model", "llm.tied"}};
  shards[1].path = {"optim", "state", "llm.weight", "exp_avg"};
  for (ShardToSave& shard : shards) {
    shard.sizes = {3, 4};
    shard.order = {0, 1};
    shard.values = values.view({-1});
  }
  ShardedCheckpointWriter writer(folder, 0, 1, std::chrono::seconds(10));
  ASSERT_TRUE(writer.write(shards, {{"step", "1"}}).ok());
  const auto sharded = open(folder);
  EXPECT_EQ(sharded->format(), "sharded");
  EXPECT_EQ(sharded->tensors().size(), 3u);
  EXPECT_EQ(sharded->tensors()[1].tied_to, size_t{0});
  EXPECT_EQ(sharded->metadata()[0].second, "1");
  for (const char* name : {"a.pt", "a.safetensors"}) {
    EXPECT_EQ(convert(folder, dir.file(name)).num_tensors, 2u);
    const auto reader = open(dir.file(name));
    EXPECT_EQ(reader->tensors()[0].name, "llm.weight");
    EXPECT_TRUE(reader->tensor(0).value().equal(values));
  }
}

TEST(ConvertTest, TiedTensorsStayTied) {
  TempDir dir;
  const std::string example = write_example(dir);
  for (const char* name : {"a.pt", "a.dcp"}) {
    convert(example, dir.file(name));
    const auto reader = open(dir.file(name));
    size_t tied = 0;
    while (plain_name(*reader, tied) != "tied_again") ++tied;
    ASSERT_TRUE(reader->tensors()[tied].tied_to.has_value());
    EXPECT_EQ(plain_name(*reader, *reader->tensors()[tied].tied_to), "tied");
  }
}

TEST(ConvertTest, ValuesBecomeMetadataOrAreReported) {
  TempDir dir;
  convert(write_example(dir), dir.file("a.safetensors"));
  const auto reader = open(dir.file("a.safetensors"));
  EXPECT_EQ(reader->metadata()[1],
            (std::pair<std::string, std::string>("step", "7")));
  EXPECT_EQ(convert(dir.file("a.safetensors"), dir.file("b.pt")).left_out,
            std::vector<std::string>{"step = 7"});
}

TEST(ConvertTest, SixBitFloatsSurvive) {
  TempDir dir;
  const auto* dtype = find_safetensors_dtype("F6_E3M2");
  auto writer =
      SafetensorsWriter::create(dir.file("a.safetensors"), {{"a", dtype, {4}}})
          .value();
  ASSERT_TRUE(writer->bytes("a", "123").ok());
  ASSERT_TRUE(writer->commit().ok());
  convert(dir.file("a.safetensors"), dir.file("b.safetensors"));
  EXPECT_EQ(SafetensorsFile::open(dir.file("b.safetensors")).value()->bytes(0),
            "123");
  EXPECT_EQ(convert_checkpoint(dir.file("a.safetensors"), dir.file("b.pt"))
                .status()
                .code(),
            absl::StatusCode::kUnimplemented);
}

TEST(ConvertTest, PrismaticToOpenVlaAndBack) {
  TempDir dir;
  FullStateDictOptions options;
  options.module_keys = {"vision_backbone", "projector", "llm_backbone"};
  options.names = {"vision_backbone.featurizer.blocks.0.ls1.gamma",
                   "projector.projector.0.weight",
                   "projector.projector.2.weight",
                   "llm_backbone.llm.model.embed_tokens.weight",
                   "llm_backbone.llm.lm_head.weight"};
  const std::string prismatic = dir.file("latest-checkpoint.pt");
  auto writer = FullStateDictWriter::create(prismatic, options).value();
  for (size_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(
        writer
            ->add(options.names[i],
                  make_tensor(at::kBFloat16, {3, 2}, static_cast<unsigned>(i)))
            .ok());
  }
  ASSERT_TRUE(writer->add_tied(options.names[4], options.names[3]).ok());
  ASSERT_TRUE(writer->commit().ok());

  ConvertOptions to_openvla, to_prismatic;
  to_openvla.to = KeyStyle::kOpenVla;
  to_prismatic.to = KeyStyle::kPrismatic;
  const std::string folder = dir.file("openvla"), back = dir.file("back.pt");
  EXPECT_EQ(convert(dir.file(""), folder, to_openvla).from,
            KeyStyle::kPrismatic);
  const auto openvla = open(folder);
  std::vector<std::string> names;
  for (const auto& tensor : openvla->tensors()) names.push_back(tensor.name);
  EXPECT_EQ(names, (std::vector<std::string>{
                       "vision_backbone.featurizer.blocks.0.ls1.scale_factor",
                       "projector.fc1.weight", "projector.fc2.weight",
                       "language_model.model.embed_tokens.weight",
                       "language_model.lm_head.weight"}));
  EXPECT_EQ(convert(folder, back, to_prismatic).from, KeyStyle::kOpenVla);
  const auto read = FullStateDictReader::open(back).value();
  EXPECT_EQ(read->module_keys(), options.module_keys);
  EXPECT_EQ(read->names(), options.names);
  expect_same_tensors(prismatic, back);
}

TEST(ConvertTest, WhatLiesBesideTheModelIsReported) {
  TempDir dir;
  auto writer = PtWriter::create(dir.file("a.pt")).value();
  ASSERT_TRUE(writer->begin_dict("optimizer").ok());
  ASSERT_TRUE(writer->tensor("exp_avg", make_tensor(at::kFloat, {2})).ok());
  ASSERT_TRUE(writer->end_dict().ok());
  ASSERT_TRUE(writer->begin_dict("state_dict").ok());
  ASSERT_TRUE(writer->tensor("a.b", make_tensor(at::kFloat, {2})).ok());
  ASSERT_TRUE(writer->end_dict().ok());
  ASSERT_TRUE(writer->commit().ok());
  EXPECT_EQ(convert(dir.file("a.pt"), dir.file("b.safetensors")).left_out,
            std::vector<std::string>{"optimizer.exp_avg"});
  EXPECT_EQ(open(dir.file("b.safetensors"))->tensors()[0].name, "a.b");
}

TEST(ConvertTest, FolderBringsItsOtherFiles) {
  TempDir dir;
  convert(write_example(dir), dir.file("one"));
  std::ofstream(dir.file("one/config.json")) << "{\"a\": 1}";
  std::ofstream(dir.file("one/empty.txt"));
  EXPECT_EQ(convert(dir.file("one"), dir.file("two")).copied_files,
            (std::vector<std::string>{"config.json", "empty.txt"}));
  EXPECT_EQ(read_file(dir.file("two/config.json")), "{\"a\": 1}");
}

// That holds `latest`, as TrainingCheckpoints keep it, or a run with one.
TEST(ConvertTest, FolderOfShardedCheckpointsIsItsLatest) {
  TempDir dir;
  std::filesystem::create_directories(dir.file("run/checkpoints"));
  const std::string step = dir.file("run/checkpoints/step-000007");
  convert(write_example(dir), step);
  std::filesystem::create_symlink("step-000007",
                                  dir.file("run/checkpoints/latest"));
  for (const char* name : {"run", "run/checkpoints"}) {
    const auto reader = open(dir.file(name));
    EXPECT_EQ(reader->format(), "sharded");
    EXPECT_EQ(reader->tensors().size(), open(step)->tensors().size());
  }
}

TEST(ConvertTest, MistakesAreNamedAndLeaveNothing) {
  TempDir dir;
  const std::string example = write_example(dir);
  ConvertOptions options;
  options.to = KeyStyle::kOpenVla;
  const auto error = [&](const std::string& input, const std::string& output) {
    return std::string(
        convert_checkpoint(input, output, options).status().message());
  };
  EXPECT_NE(error(example, dir.file("b.pt")).find("no known key style"),
            std::string::npos);
  EXPECT_NE(error(dir.file("none.pt"), dir.file("b.pt")).find("none.pt"),
            std::string::npos);
  std::filesystem::create_directory(dir.file("empty"));
  EXPECT_NE(
      error(dir.file("empty"), dir.file("b.pt")).find("holds no checkpoint"),
      std::string::npos);
  EXPECT_EQ(dir.names().size(), 2u);
}

TEST(ConvertTest, ShardedPtFilesOfTransformersAreRead) {
  TempDir dir;
  for (const char* name : {"a", "b"}) {
    auto writer =
        PtWriter::create(dir.file(absl::StrCat(name, ".bin"))).value();
    ASSERT_TRUE(writer->tensor(name, make_tensor(at::kFloat, {2})).ok());
    ASSERT_TRUE(writer->commit().ok());
  }
  dir.write("pytorch_model.bin.index.json",
            R"({"weight_map":{"a":"a.bin","b":"b.bin"}})");
  const auto reader = open(dir.file(""));
  EXPECT_EQ(reader->format(), "sharded pt");
  ASSERT_EQ(reader->tensors().size(), 2u);
  EXPECT_EQ(reader->tensors()[1].name, "b");
  EXPECT_TRUE(bit_equal(*reader->tensor(1), make_tensor(at::kFloat, {2})));
}

int64_t peak_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") {
      int64_t kib = 0;
      status >> kib;
      return kib;
    }
  }
  return 0;
}

TEST(ConvertTest, ALargeFilePassesInBoundedMemory) {
  TempDir dir;
  // Eight tensors of 32 MiB, in a sparse file.
  const int64_t size = int64_t{32} << 20;
  std::string header = "{";
  for (int i = 0; i < 8; ++i) {
    absl::StrAppend(
        &header, i == 0 ? "" : ",", "\"t", i, R"(":{"dtype":"U8","shape":[)",
        size, R"(],"data_offsets":[)", i * size, ",", (i + 1) * size, "]}");
  }
  header += "}";
  std::string start(8, '\0');
  start[0] = static_cast<char>(header.size());
  start[1] = static_cast<char>(header.size() >> 8);
  const std::string path = dir.write("a.safetensors", start + header);
  std::filesystem::resize_file(
      path, start.size() + header.size() + static_cast<size_t>(8 * size));
  std::ofstream("/proc/self/clear_refs") << 5;  // peak = now
  const int64_t before = peak_kib();
  for (const char* name : {"b.pt", "b.dcp"}) {
    convert(path, dir.file(name));
    EXPECT_LT(peak_kib() - before, 3 * (size >> 10)) << name;
    EXPECT_EQ(open(dir.file(name))->tensors().size(), 8u);
  }
}

TEST(CheckpointListingTest, TableShowsNamesShapesAndMetadata) {
  TempDir dir;
  auto writer = PtWriter::create(dir.file("a.pt")).value();
  const at::Tensor tensor = make_tensor(at::kBFloat16, {3, 1000});
  ASSERT_TRUE(writer->tensor("a", tensor).ok());
  ASSERT_TRUE(writer->tensor("b\x1b[31m", tensor).ok());
  ASSERT_TRUE(writer->value("rate", 0.5).ok());
  ASSERT_TRUE(writer->commit().ok());
  EXPECT_EQ(checkpoint_table(*open(dir.file("a.pt"))),
            absl::StrCat(dir.file("a.pt"),
                         ": pt, 2 tensors, 5.9 KiB\n"
                         "  rate = 0.5\n"
                         "name       dtype     shape      size\n"
                         "a          bfloat16  [3, 1000]  5.9 KiB\n"
                         "b\\x1b[31m  bfloat16  [3, 1000]  is a\n"));
}

TEST(CheckpointListingTest, JsonHoldsTheSame) {
  TempDir dir;
  const auto json =
      nlohmann::json::parse(checkpoint_json(*open(write_example(dir))));
  EXPECT_EQ(json["format"], "pt");
  EXPECT_EQ(json["num_tensors"], 23);
  EXPECT_EQ(json["metadata"]["step"], "7");
  EXPECT_EQ(json["tensors"][0]["name"], "Byte");
  EXPECT_EQ(json["tensors"][0]["dtype"], "uint8");
  EXPECT_EQ(json["tensors"][0]["shape"], (std::vector<int>{3, 2}));
  EXPECT_EQ(json["tensors"][22]["tied_to"], "tied");
}

}  // namespace
}  // namespace fullshard
