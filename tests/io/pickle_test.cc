#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "fullshard/io/pickle_reader.h"
#include "fullshard/io/pickle_writer.h"

namespace fullshard {
namespace {

std::string pickle(const std::string& body) {
  return absl::StrCat(std::string("\x80\x02", 2), body, ".");
}

absl::StatusCode code_of(const std::string& body) {
  return read_pickle(pickle(body)).status().code();
}

std::string binput(int i) { return std::string{'q', static_cast<char>(i)}; }
std::string binget(int i) { return std::string{'h', static_cast<char>(i)}; }

PickledTensor example_tensor() {
  PickledTensor tensor;
  tensor.dtype = c10::ScalarType::Float;
  tensor.storage_key = "7";
  tensor.storage_bytes = 4 * 100;
  tensor.storage_offset = 3;
  tensor.sizes = {2, 3};
  tensor.strides = {1, 2};
  return tensor;
}

TEST(PickleTest, ScalarsRoundTrip) {
  const int64_t integers[] = {0,
                              1,
                              -1,
                              255,
                              256,
                              65536,
                              1 << 30,
                              -(1LL << 31),
                              1LL << 31,
                              std::numeric_limits<int64_t>::min(),
                              std::numeric_limits<int64_t>::max()};
  for (const int64_t value : integers) {
    PickleWriter writer;
    writer.integer(value);
    const auto read = read_pickle(writer.finish());
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->as_int(), value);
  }
  for (const double value : {0.0, -1.5, 1e300, HUGE_VAL}) {
    PickleWriter writer;
    writer.number(value);
    EXPECT_EQ(read_pickle(writer.finish())->as_float(), value);
  }
}

TEST(PickleTest, NestedDictsKeepOrderAndKind) {
  PickleWriter writer;
  writer.begin_ordered_dict();
  writer.string("b");
  writer.begin_dict();
  writer.end_dict();
  writer.string("a.\xc3\xa9/");
  writer.none();
  writer.string("t");
  writer.boolean(true);
  writer.end_dict();
  const auto read = read_pickle(writer.finish());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->kind(), PtKind::kOrderedDict);
  ASSERT_EQ(read->size(), 3u);
  EXPECT_EQ(read->key(0).as_string(), "b");
  EXPECT_EQ(read->item(0).kind(), PtKind::kDict);
  EXPECT_EQ(read->key(1).as_string(), "a.\xc3\xa9/");
  EXPECT_EQ(read->item(1).kind(), PtKind::kNone);
  EXPECT_TRUE(read->find("t")->as_bool());
  EXPECT_FALSE(read->find("x").has_value());
}

TEST(PickleTest, TensorsRoundTrip) {
  for (const auto dtype :
       {c10::ScalarType::Float, c10::ScalarType::Float8_e4m3fn}) {
    PickledTensor tensor = example_tensor();
    tensor.dtype = dtype;
    PickleWriter writer;
    writer.tensor(tensor);
    const auto read = read_pickle(writer.finish());
    ASSERT_TRUE(read.ok()) << read.status();
    const PickledTensor copy = read->as_tensor();
    EXPECT_EQ(copy.dtype, dtype);
    EXPECT_EQ(copy.storage_key, "7");
    EXPECT_EQ(copy.storage_bytes, tensor.storage_bytes);
    EXPECT_EQ(copy.storage_offset, 3);
    EXPECT_EQ(copy.sizes, tensor.sizes);
    EXPECT_EQ(copy.strides, tensor.strides);
  }
}

TEST(PickleTest, OtherGlobalsAreRefusedByName) {
  const char* globals[] = {"os\nsystem",
                           "builtins\neval",
                           "posix\nsystem",
                           "torch\nload",
                           "torch._utils\n_rebuild_qtensor",
                           "collections\ndefaultdict"};
  for (const std::string global : globals) {
    const absl::Status status =
        read_pickle(pickle(absl::StrCat("c", global, "\nX\x02",
                                        std::string(3, '\0'), "ls\x85R")))
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
    std::string name = global;
    name[name.find('\n')] = '.';
    EXPECT_NE(status.message().find(name), std::string::npos) << status;
  }
}

TEST(PickleTest, TensorsOutsideTheirStorageAreRefused) {
  const auto check = [](auto change) {
    PickledTensor tensor = example_tensor();
    change(&tensor);
    PickleWriter writer;
    writer.tensor(tensor);
    return read_pickle(writer.finish()).status().code();
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(check([](PickledTensor* t) { t->storage_offset = 94; }),
            absl::StatusCode::kOk);
  EXPECT_EQ(check([](PickledTensor* t) { t->storage_offset = 95; }),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(check([](PickledTensor* t) { t->storage_offset = -1; }),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(check([](PickledTensor* t) { t->strides[0] = kHuge; }),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(check([](PickledTensor* t) {
              t->sizes = {kHuge, kHuge};
            }),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(check([](PickledTensor* t) {
              t->sizes = {-2, 3};
            }),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(check([](PickledTensor* t) { t->storage_bytes = -4; }),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(check([](PickledTensor* t) { t->strides = {1}; }),
            absl::StatusCode::kDataLoss);
}

TEST(PickleTest, MalformedPicklesAreErrors) {
  for (const std::string body : {"",
                                 ")",
                                 "NN",
                                 "(",
                                 "t",
                                 "}N",
                                 "}Na",
                                 "]Ns",
                                 "h\x01",
                                 "R",
                                 "NR",
                                 "Q",
                                 ")Q",
                                 "b",
                                 "}}b",
                                 "s",
                                 "}(Nu",
                                 "\xff",
                                 "X\xff\xff\xff\x7f",
                                 "(NNNN",
                                 "ctorch\nSize\n)R",
                                 "ctorch\ndevice\n)R",
                                 "ccollections\nOrderedDict\nN\x85R",
                                 "ccollections\nOrderedDict\n"}) {
    const absl::StatusCode code = code_of(body);
    if (body == ")") {
      EXPECT_EQ(code, absl::StatusCode::kOk);
    } else {
      EXPECT_EQ(code, absl::StatusCode::kDataLoss) << body;
    }
  }
  EXPECT_EQ(read_pickle("").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(read_pickle("\x80\x04N.").status().code(),
            absl::StatusCode::kUnimplemented);
}

TEST(PickleTest, KeysThatAppearTwiceAreErrors) {
  EXPECT_EQ(code_of("}(K\x01NK\x01Nu"), absl::StatusCode::kDataLoss);
  EXPECT_EQ(code_of("}(U\x01"
                    "aNU\x01"
                    "aNu"),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(code_of("}(U\x01"
                    "aNU\x01"
                    "bNu"),
            absl::StatusCode::kOk);
}

TEST(PickleTest, LoopsAndDeepNestingAreErrors) {
  EXPECT_EQ(code_of(absl::StrCat("]", binput(1), binget(1), "a")),
            absl::StatusCode::kDataLoss);
  std::string deep;
  for (int i = 0; i < 200000; ++i) deep += "]";
  for (int i = 1; i < 200000; ++i) deep += "a";
  EXPECT_EQ(code_of(deep), absl::StatusCode::kDataLoss);
  EXPECT_EQ(code_of(std::string(3000000, '(')), absl::StatusCode::kDataLoss);
}

TEST(PickleTest, SharedValuesMayNotUnfoldWithoutLimit) {
  std::string bomb = absl::StrCat("]", binput(0));
  for (int level = 1; level < 100; ++level) {
    absl::StrAppend(&bomb, "](", binget(level - 1), binget(level - 1), "e",
                    binput(level));
  }
  std::string body = "(";
  absl::StrAppend(&body, bomb, "t");
  EXPECT_EQ(code_of(body), absl::StatusCode::kDataLoss);
}

TEST(PickleTest, LargeInputsTakeLinearTime) {
  const auto start = std::chrono::steady_clock::now();
  std::string lists = "(";
  for (int i = 0; i < 1000000; ++i) lists += "]q\x01";
  EXPECT_EQ(code_of(lists + "t"), absl::StatusCode::kResourceExhausted);
  std::string numbers = "](", floats = "](";
  for (int i = 0; i < 1000000; ++i) {
    numbers += "M\x10\x27";
    floats += std::string("G?\xf0\0\0\0\0\0\0", 9);
  }
  EXPECT_EQ(code_of(numbers + "e"), absl::StatusCode::kOk);
  EXPECT_EQ(code_of(floats + "e"), absl::StatusCode::kOk);
  EXPECT_EQ(code_of(std::string(4000000, ']')), absl::StatusCode::kDataLoss);
  EXPECT_EQ(code_of("Nr\xff\xff\xff\xff"), absl::StatusCode::kDataLoss);
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 10.0);
}

TEST(PickleTest, RandomFlipsNeverCrash) {
  PickleWriter writer;
  writer.begin_dict();
  for (int i = 0; i < 5; ++i) {
    writer.string(absl::StrCat("layer.", i));
    writer.tensor(example_tensor());
  }
  writer.string("nested");
  writer.begin_ordered_dict();
  writer.string("x");
  writer.number(2.5);
  writer.end_dict();
  writer.end_dict();
  const std::string bytes = writer.finish();
  std::mt19937 random(1);
  for (int trial = 0; trial < 50000; ++trial) {
    std::string damaged = bytes;
    for (int flips = 1 + static_cast<int>(random() % 4); flips > 0; --flips) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    if (trial % 3 == 0) damaged.resize(random() % damaged.size());
    const auto read = read_pickle(damaged);
    if (!read.ok() || !read->is_dict()) continue;
    for (size_t i = 0; i < read->size(); ++i) {
      if (read->item(i).is_tensor()) (void)read->item(i).as_tensor();
    }
  }
}

}  // namespace
}  // namespace fullshard
