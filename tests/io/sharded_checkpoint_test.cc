#include <filesystem>
#include <numeric>
#include <set>
#include <thread>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/io/sharded_checkpoint_reader.h"
#include "fullshard/io/sharded_checkpoint_writer.h"
#include "fullshard/tests/io/fault_file_system.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gmock/gmock.h"

namespace fullshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::vector<int64_t>> orders_of(size_t dims) {
  std::vector<int64_t> order(dims);
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::vector<int64_t>> all;
  do {
    all.push_back(order);
  } while (std::next_permutation(order.begin(), order.end()));
  return all;
}

// Every range of tensors of every order: the boxes hold its elements, in order,
// each as a range of memory.
TEST(SplitIntoBoxesTest, EveryRangeOfSmallTensors) {
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{
           {}, {5}, {1}, {3, 4}, {4, 1}, {2, 3, 4}, {2, 1, 3, 2}}) {
    int64_t numel = 1;
    for (int64_t size : sizes) numel *= size;
    for (const auto& order : orders_of(sizes.size())) {
      const at::Tensor tensor =
          at::arange(numel).as_strided(sizes, strides_of(sizes, order));
      for (int64_t begin = 0; begin < numel; ++begin) {
        for (int64_t end = begin + 1; end <= numel; ++end) {
          int64_t at = begin;
          const auto boxes = split_into_boxes(sizes, order, begin, end - begin);
          EXPECT_LE(boxes.size(), std::max<size_t>(1, 2 * sizes.size() - 1));
          for (const TensorBox& box : boxes) {
            ASSERT_EQ(box.begin, at);
            at::Tensor part = tensor;
            for (size_t d = 0; d < sizes.size(); ++d) {
              part = part.narrow(static_cast<int64_t>(d), box.offsets[d],
                                 box.sizes[d]);
            }
            ASSERT_EQ(part.numel(), box.numel);
            const at::Tensor in_memory =
                part.permute(order).contiguous().view({-1});
            ASSERT_TRUE(in_memory.equal(at::arange(at, at + box.numel)));
            at += box.numel;
          }
          ASSERT_EQ(at, end);
        }
      }
    }
  }
  EXPECT_THAT(split_into_boxes({0, 3}, {0, 1}, 0, 0), IsEmpty());
}

// A tensor that `num_ranks` ranks hold parts of, of unequal length.
struct Whole {
  std::vector<std::string> path;
  at::Tensor values;  // 1-D, in memory order.
  std::vector<int64_t> sizes;
  std::vector<int64_t> order;
};

std::vector<Whole> tensors(double scale = 1) {
  const auto values = [&](int64_t numel) {
    return at::arange(numel, at::kFloat) * scale;
  };
  return {{{"model", "a.weight"}, values(60), {3, 4, 5}, {0, 1, 2}},
          {{"model", "channels.last"}, values(24), {2, 3, 4}, {0, 2, 1}},
          {{"model", "half"}, values(7).to(at::kBFloat16), {7}, {0}},
          {{"model", "scalar"}, values(1), {}, {}},
          {{"model", "empty"}, values(0), {0, 3}, {0, 1}},
          {{"model", "odd/\"name\" \u00e9"}, values(9).to(at::kLong), {9}, {0}},
          {{"optim", "state", "a.weight", "exp_avg"},
           values(60) + 1,
           {3, 4, 5},
           {0, 1, 2}}};
}

std::vector<ShardToSave> shards_of(int rank, int num_ranks, double scale = 1) {
  std::vector<ShardToSave> shards;
  for (const Whole& whole : tensors(scale)) {
    const int64_t numel = whole.values.numel();
    // Cuts that fall anywhere.
    const int64_t begin = numel * rank * rank / (num_ranks * num_ranks);
    const int64_t end =
        numel * (rank + 1) * (rank + 1) / (num_ranks * num_ranks);
    ShardToSave shard;
    shard.path = whole.path;
    shard.sizes = whole.sizes;
    shard.order = whole.order;
    shard.begin = begin;
    shard.values = whole.values.narrow(0, begin, end - begin);
    if (shard.path.back() == "a.weight") {
      shard.aliases = {{"model", "tied.weight"}};
    }
    shards.push_back(shard);
  }
  return shards;
}

// All ranks as threads: they meet only through the file system.
std::vector<absl::Status> save(
    const std::string& folder, int num_ranks, double scale = 1,
    const std::function<FileSystem&(int rank)>& file_system = nullptr,
    std::chrono::milliseconds timeout = std::chrono::milliseconds(20000)) {
  std::vector<absl::Status> results(static_cast<size_t>(num_ranks));
  const auto of = [&](int rank) -> FileSystem& {
    return file_system ? file_system(rank) : FileSystem::posix();
  };
  results[0] = ShardedCheckpointWriter::prepare(folder, of(0));
  if (!results[0].ok()) return results;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      ShardedCheckpointWriter writer(folder, rank, num_ranks, timeout,
                                     of(rank));
      results[static_cast<size_t>(rank)] = writer.write(
          shards_of(rank, num_ranks, scale), {{"step", "7"}, {"note", "a\nb"}});
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

void save_well(const std::string& folder, int num_ranks, double scale = 1) {
  for (const absl::Status& status : save(folder, num_ranks, scale)) {
    ASSERT_TRUE(status.ok()) << status;
  }
}

void expect_holds(const std::string& folder, double scale = 1) {
  const auto reader = ShardedCheckpointReader::open(folder);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_TRUE((*reader)->verify().ok());
  EXPECT_EQ((*reader)->manifest().state.at("note"), "a\nb");
  for (const Whole& whole : tensors(scale)) {
    const auto* saved = (*reader)->find(flat_name(whole.path));
    ASSERT_NE(saved, nullptr) << flat_name(whole.path);
    const at::Tensor tensor = (*reader)->tensor(*saved).value();
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef(whole.sizes));
    EXPECT_TRUE(tensor.equal(whole.values.as_strided(
        whole.sizes, strides_of(whole.sizes, whole.order))))
        << flat_name(whole.path);
  }
  EXPECT_EQ((*reader)->find("model.tied.weight"),
            (*reader)->find("model.a.weight"));
}

TEST(ShardedCheckpointTest, RoundTripsFromAnyNumberOfRanks) {
  for (int num_ranks : {1, 2, 3, 4, 8}) {
    TempDir dir;
    const std::string folder = dir.file("step-000007");
    save_well(folder, num_ranks);
    expect_holds(folder);
    EXPECT_THAT(dir.names(), ElementsAre("step-000007"));
  }
}

TEST(ShardedCheckpointTest, RangesOfEveryOrderAndDtype) {
  TempDir dir;
  save_well(dir.file("c"), 3);
  const auto reader = ShardedCheckpointReader::open(dir.file("c")).value();
  const auto& saved = *reader->find("model.channels.last");
  const at::Tensor whole = reader->tensor(saved).value();
  for (const auto& order : orders_of(3)) {
    const at::Tensor in_memory = whole.permute(order).contiguous().view({-1});
    for (int64_t begin = 0; begin <= 24; ++begin) {
      for (int64_t end = begin; end <= 24; ++end) {
        at::Tensor out = at::empty({end - begin}, at::kDouble);
        ASSERT_TRUE(reader->read(saved, order, begin, out).ok());
        ASSERT_TRUE(out.equal(in_memory.slice(0, begin, end).to(at::kDouble)));
      }
    }
  }
  EXPECT_FALSE(reader->read(saved, saved.order, 20, at::empty({5})).ok());
}

std::string error_of(const std::string& folder) {
  const auto reader = ShardedCheckpointReader::open(folder);
  if (!reader.ok()) return std::string(reader.status().message());
  return std::string((*reader)->verify().message());
}

TEST(ShardedCheckpointTest, DamageIsNamed) {
  TempDir dir;
  const std::string folder = dir.file("c");
  EXPECT_THAT(error_of(folder), HasSubstr("expected the folder"));
  save_well(folder, 2);
  const std::string data = folder + "/__1_0.distcp";
  const std::string bytes = read_file(data);
  const std::string manifest = read_file(folder + "/manifest.json");
  const auto write = [](const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  };
  // One bit of an element.
  const auto reader = ShardedCheckpointReader::open(folder).value();
  const auto& piece = reader->find("model.a.weight")->pieces.back();
  std::string flipped = bytes;
  flipped[static_cast<size_t>(piece.data_offset)] ^= 1;
  write(data, flipped);
  EXPECT_THAT(error_of(folder),
              HasSubstr("__1_0.distcp: bad checksum in 'model.a.weight'"));
  write(data, bytes.substr(0, bytes.size() - 1));
  EXPECT_THAT(error_of(folder),
              HasSubstr("incomplete checkpoint: __1_0.distcp has"));
  std::filesystem::remove(data);
  EXPECT_THAT(error_of(folder), HasSubstr("__1_0.distcp is missing"));
  write(data, bytes);
  const auto with = [&](const std::string& from, const std::string& to) {
    write(folder + "/manifest.json",
          absl::StrReplaceAll(manifest, {{from, to}}));
    return error_of(folder);
  };
  EXPECT_THAT(with("\"version\":1", "\"version\":2"),
              HasSubstr("got 'fullshard-sharded' version 2"));
  EXPECT_THAT(with("__1_0.distcp", "../c/x"), HasSubstr("file name"));
  EXPECT_THAT(with("bfloat16", "bfloat17"), HasSubstr("unknown dtype"));
  EXPECT_THAT(with("[3,4,5]", "[3,4,6]"), HasSubstr("incomplete"));
  EXPECT_THAT(with("[3,4,5]", "[3,4,9223372036854775807]"),
              HasSubstr("too large"));
  EXPECT_THAT(with("[0,2,1]", "[0,2,2]"), HasSubstr("order"));
  // Python's index is left, but a run does not go on from that.
  std::filesystem::remove(folder + "/manifest.json");
  EXPECT_TRUE(ShardedCheckpointReader::open(folder).value()->is_of_python());
  std::filesystem::rename(folder, dir.file("step-000001"));
  EXPECT_THAT(find_latest_checkpoint(dir.file(".")).skipped,
              ElementsAre(HasSubstr("manifest.json is missing")));
  std::filesystem::remove(dir.file("step-000001/.metadata"));
  EXPECT_THAT(error_of(dir.file("step-000001")),
              HasSubstr("manifest.json is missing"));
}

// Cut or changed anywhere, it is refused or read; nothing else happens.
TEST(ShardedCheckpointTest, MutatedManifestsNeverCrash) {
  TempDir dir;
  const std::string folder = dir.file("c");
  save_well(folder, 2);
  const std::string manifest = read_file(folder + "/manifest.json");
  for (size_t i = 0; i < manifest.size(); i += 3) {
    EXPECT_FALSE(ShardedManifest::parse(manifest.substr(0, i)).ok()) << i;
    for (const char c : {'9', '"', '[', '}', '\0'}) {
      std::string changed = manifest;
      changed[i] = c;
      const auto parsed = ShardedManifest::parse(changed);
      if (!parsed.ok()) continue;
      ShardedManifest copy = *parsed;
      (void)copy.check_complete();
    }
  }
}

TEST(ShardedCheckpointTest, AnErrorOfOneRankReachesAll) {
  for (int failing : {0, 1, 2}) {
    TempDir dir;
    const std::string folder = dir.file("step-000001");
    save_well(folder, 3);
    FaultFileSystem broken;
    broken.fail_at = failing == 0 ? 2 : 1;
    const auto results = save(folder, 3, 2, [&](int rank) -> FileSystem& {
      return rank == failing ? broken : FileSystem::posix();
    });
    for (const absl::Status& status : results) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("No space left"));
    }
    if (failing != 0) {
      EXPECT_THAT(std::string(results[0].message()),
                  HasSubstr(absl::StrCat("rank ", failing, ": ")));
    }
    expect_holds(folder);
    save_well(folder, 3, 2);  // What failed is no hindrance.
    expect_holds(folder, 2);
  }
}

TEST(ShardedCheckpointTest, ARankThatDoesNotComeIsNamed) {
  TempDir dir;
  const std::string folder = dir.file("step-000001");
  ASSERT_TRUE(ShardedCheckpointWriter::prepare(folder).ok());
  ShardedCheckpointWriter writer(folder, 0, 2, std::chrono::milliseconds(50));
  EXPECT_THAT(std::string(writer.write(shards_of(0, 2), {}).message()),
              HasSubstr("rank 1 did not finish within 0.05 s"));
  ASSERT_TRUE(ShardedCheckpointWriter::prepare(folder).ok());
  ShardedCheckpointWriter other(folder, 1, 2, std::chrono::milliseconds(50));
  EXPECT_THAT(std::string(other.write(shards_of(1, 2), {}).message()),
              HasSubstr("rank 0 did not finish"));
}

// The rank that stopped waiting has the last word, or rank 0 has: never one of
// them a checkpoint that the other says has failed.
TEST(ShardedCheckpointTest, ARankThatStoppedWaitingFailsTheSave) {
  TempDir dir;
  const std::string folder = dir.file("step-000001");
  ASSERT_TRUE(ShardedCheckpointWriter::prepare(folder).ok());
  ShardedCheckpointWriter early(folder, 1, 2, std::chrono::milliseconds(50));
  EXPECT_FALSE(early.write(shards_of(1, 2), {}).ok());
  ShardedCheckpointWriter late(folder, 0, 2, std::chrono::milliseconds(5000));
  EXPECT_THAT(std::string(late.write(shards_of(0, 2), {}).message()),
              HasSubstr("rank 1: save of " + folder +
                        ": rank 0 did not finish "
                        "within 0.05 s"));
  EXPECT_FALSE(std::filesystem::exists(folder));
  // Any pair of times.
  for (int slow = 0; slow < 40; ++slow) {
    ASSERT_TRUE(ShardedCheckpointWriter::prepare(folder).ok());
    absl::Status first, second;
    std::thread thread([&] {
      ShardedCheckpointWriter writer(folder, 1, 2,
                                     std::chrono::milliseconds(20));
      second = writer.write(shards_of(1, 2), {{"note", "a\nb"}});
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(slow));
    ShardedCheckpointWriter writer(folder, 0, 2, std::chrono::seconds(5));
    first = writer.write(shards_of(0, 2), {{"note", "a\nb"}});
    thread.join();
    EXPECT_EQ(first.ok(), second.ok()) << first << second;
    EXPECT_EQ(std::filesystem::exists(folder), first.ok());
    if (first.ok()) expect_holds(folder);
    std::filesystem::remove_all(folder);
  }
}

// Nor may what one of them throws keep the others waiting.
TEST(ShardedCheckpointTest, AnExceptionOnOneRankReachesAll) {
  class Throwing : public FileSystem {
   public:
    int create(const std::string& /*path*/) override { throw std::bad_alloc(); }
  };
  for (int failing : {0, 1, 2}) {
    TempDir dir;
    Throwing throwing;
    const auto results =
        save(dir.file("step-000001"), 3, 1, [&](int rank) -> FileSystem& {
          return rank == failing ? throwing : FileSystem::posix();
        });
    for (const absl::Status& status : results) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("bad_alloc"));
    }
    // The data of all ranks is gone, whoever failed and when.
    for (const auto& entry : std::filesystem::recursive_directory_iterator(
             dir.file(".step-000001.saving"))) {
      EXPECT_NE(entry.path().extension(), ".distcp") << entry.path();
    }
  }
}

// At every call that makes something durable: afterwards the old checkpoint
// loads or the new one, also where one of the same name is replaced.
TEST(ShardedCheckpointTest, KilledOrFailingAtEveryCallOldOrNewLoads) {
  FaultFileSystem counting;
  {
    TempDir dir;
    save_well(dir.file("step-000001"), 1);
    ASSERT_TRUE(save(dir.file("step-000001"), 1, 2,
                     [&](int) -> FileSystem& { return counting; })[0]
                    .ok());
  }
  ASSERT_GT(counting.num_calls, 10);
  for (auto fault :
       {FaultFileSystem::Fault::kError, FaultFileSystem::Fault::kKill}) {
    for (const char* name : {"step-000001", "step-000002"}) {
      for (int call = 0; call < counting.num_calls; ++call) {
        TempDir dir;
        save_well(dir.file("step-000001"), 1);
        const auto outcome =
            testing::collect_processes(1, [&](const LaunchEnv&) {
              FaultFileSystem faulty;
              faulty.fail_at = call;
              faulty.fault = fault;
              const auto results =
                  save(dir.file(name), 1, 2,
                       [&](int) -> FileSystem& { return faulty; });
              _exit(results[0].ok() ? 0 : 1);
            })[0];
        const LatestCheckpoint latest = find_latest_checkpoint(dir.file("."));
        ASSERT_NE(latest.path, "") << call;
        const auto reader = ShardedCheckpointReader::open(latest.path).value();
        ASSERT_TRUE(reader->verify().ok());
        const double second = reader->tensor(*reader->find("model.a.weight"))
                                  .value()
                                  .view({-1})[1]
                                  .item<double>();
        EXPECT_TRUE(second == 1 || second == 2) << second;
        if (outcome.exit_code == 0 && outcome.signal == 0) {
          EXPECT_EQ(second, 2);
        }
        save_well(dir.file(name), 1, 3);
        expect_holds(dir.file(name), 3);
      }
    }
  }
}

TEST(ShardedCheckpointTest, TheLatestCompleteOneIsFound) {
  TempDir dir;
  EXPECT_EQ(find_latest_checkpoint(dir.file(".")).path, "");
  for (int step : {1, 20, 3}) {
    save_well(dir.file(step_folder_name(step)), 2);
  }
  std::filesystem::create_directory(dir.file(".step-000099.saving"));
  EXPECT_EQ(find_latest_checkpoint(dir.file(".")).path,
            dir.file("./step-000020"));
  std::filesystem::remove(dir.file("step-000020/__1_0.distcp"));
  const LatestCheckpoint latest = find_latest_checkpoint(dir.file("."));
  EXPECT_EQ(latest.path, dir.file("./step-000003"));
  EXPECT_THAT(latest.skipped,
              ElementsAre(HasSubstr("step-000020: incomplete checkpoint")));
}

}  // namespace
}  // namespace fullshard
