// One file of a whole model that every rank writes its own elements of, and
// from which every rank reads its own.

#include "fullshard/full_checkpoint.h"

#include <cerrno>
#include <filesystem>
#include <functional>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/max_over_ranks.h"
#include "fullshard/io/checkpoint_reader.h"
#include "fullshard/io/full_state_dict.h"
#include "fullshard/io/pt_reader.h"
#include "fullshard/io/read_elements.h"
#include "fullshard/io/safetensors.h"
#include "fullshard/tests/io/fault_file_system.h"
#include "fullshard/tests/io/python.h"
#include "fullshard/tests/io/temp_dir.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "fullshard/tests/train/odd_model.h"
#include "gmock/gmock.h"

namespace fullshard {
namespace {

using testing::expect_equal;
using ::testing::HasSubstr;
using testing::layer_units;
using testing::OddModel;
using testing::run_ranks;
using testing::RunRanksOptions;
using testing::State;
using testing::state_of;

// How a job is laid out.
struct Layout {
  int ranks = 1;
  int shard_group_size = 0;
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  const char* backend = "shm";
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {1},
      {2},
      {3},
      {4, 2, ShardingStrategy::kHybridShard},
      {2, 0, ShardingStrategy::kNoShard},
      {8},
      {2, 0, ShardingStrategy::kShardGradOp, "gloo"},
      {4, 2, ShardingStrategy::kHybridShard, "gloo"}};
  return all;
}

template <class Model>
void with_model(const Layout& layout,
                const std::function<void(ProcessGroups&,
                                         FullyShardedModule<Model>&)>& body) {
  RunRanksOptions run;
  run.shard_group_size = layout.shard_group_size;
  run.backend = layout.backend;
  run_ranks(
      layout.ranks,
      [&](ProcessGroups& groups) {
        ShardOptions options = layer_units();
        options.strategy = layout.strategy;
        auto model =
            fully_shard(std::make_shared<Model>(), groups, options).value();
        body(groups, model);
      },
      run);
}

// What a file holds, by the names of the model.
State state_in(const std::string& path) {
  State state;
  const auto reader = open_checkpoint(path).value();
  for (size_t i = 0; i < reader->tensors().size(); ++i) {
    state[reader->tensors()[i].name] = reader->tensor(i).value();
  }
  return state;
}

TEST(SaveFullCheckpointTest, HoldsEveryTensorWhoeverWroteIt) {
  TempDir dir;
  const auto name = [&](const char* suffix, size_t layout) {
    return dir.file(absl::StrCat("m", layout, suffix));
  };
  for (size_t i = 0; i < layouts().size(); ++i) {
    with_model<OddModel>(layouts()[i], [&](ProcessGroups& groups, auto& model) {
      for (const char* suffix : {".pt", ".safetensors"}) {
        const absl::Status status =
            save_full_checkpoint(model, name(suffix, i));
        EXPECT_TRUE(status.ok()) << status;
      }
      const State expected = state_of(model);
      if (groups.rank() != 0) return;
      expect_equal(state_in(name(".pt", i)), expected);
      expect_equal(state_in(name(".safetensors", i)), expected);
      const auto pt = PtReader::open(name(".pt", i)).value();
      EXPECT_TRUE(pt->verify().ok()) << pt->verify();
      const auto tensor = [&](const char* key) {
        return pt->tensor(*pt->root().find(key)).value();
      };
      EXPECT_EQ(tensor("turned").strides(), at::IntArrayRef({1, 7}));
      EXPECT_TRUE(tensor("head.weight").is_alias_of(tensor("layer0.weight")));
    });
    // Byte for byte what one rank writes.
    EXPECT_EQ(read_file(name(".pt", i)), read_file(name(".pt", 0)));
    EXPECT_EQ(dir.names().size(), 2 * (i + 1));
  }
}

struct Wide : torch::nn::Module {
  Wide() {
    at::manual_seed(5);
    layer = register_module("layer", torch::nn::Linear(1000, 1000));
    last = register_module("last", torch::nn::Linear(1000, 3));
  }
  torch::nn::Linear layer{nullptr}, last{nullptr};
};

// Counts the bytes that a rank writes and reads.
class CountingFileSystem : public FileSystem {
 public:
  ssize_t write(int fd, const void* data, size_t size) override {
    const ssize_t count = FileSystem::write(fd, data, size);
    written += count;
    return count;
  }
  ssize_t read_at(int fd, void* data, size_t size, int64_t offset) override {
    const ssize_t count = FileSystem::read_at(fd, data, size, offset);
    read += count;
    return count;
  }
  int64_t written = 0, read = 0;
};

TEST(SaveFullCheckpointTest, EachRankWritesItsShare) {
  TempDir dir;
  with_model<Wide>({4}, [&](ProcessGroups&, auto& model) {
    for (const char* suffix : {"m.pt", "m.safetensors"}) {
      CountingFileSystem counting;
      FullCheckpointOptions options;
      options.file_system = &counting;
      ASSERT_TRUE(save_full_checkpoint(model, dir.file(suffix), options).ok());
      const int64_t total =
          static_cast<int64_t>(std::filesystem::file_size(dir.file(suffix)));
      EXPECT_LT(counting.written, total / 4 + (64 << 10));
    }
  });
}

// As the Prismatic family names things.
TEST(SaveFullCheckpointTest, WritesSelectedModulesAsTheirMaps) {
  TempDir dir;
  with_model<OddModel>({3}, [&](ProcessGroups& groups, auto& model) {
    FullCheckpointOptions options;
    options.module_keys = {"head", "layer1"};
    options.all_module_keys = {"layer0"};
    const std::string path = dir.file("m.pt");
    const absl::Status refused = save_full_checkpoint(model, path, options);
    EXPECT_THAT(std::string(refused.message()),
                groups.rank() == 0
                    ? HasSubstr("belongs to none of the model's modules")
                    : HasSubstr("failed on another rank"));
    EXPECT_FALSE(std::filesystem::exists(path));
  });
  with_model<Wide>({2}, [&](ProcessGroups& groups, auto& model) {
    FullCheckpointOptions options;
    options.module_keys = {"last"};
    options.all_module_keys = {"layer"};
    ASSERT_TRUE(save_full_checkpoint(model, dir.file("w.pt"), options).ok());
    ASSERT_TRUE(
        save_full_checkpoint(model, dir.file("w.safetensors"), options).ok());
    if (groups.rank() != 0) return;
    const auto reader = FullStateDictReader::open(dir.file("w.pt")).value();
    EXPECT_EQ(reader->module_keys(), std::vector<std::string>{"last"});
    EXPECT_EQ(reader->names(),
              (std::vector<std::string>{"last.weight", "last.bias"}));
    EXPECT_TRUE(state_in(dir.file("w.safetensors"))
                    .at("last.weight")
                    .equal(reader->tensor("last.weight").value()));
  });
}

// On a host that does not see rank 0's file.
class OtherHost : public CountingFileSystem {
 public:
  int open_to_write(const std::string&) override { return -ENOENT; }
};

TEST(SaveFullCheckpointTest, RankZeroWritesAloneWithoutASharedFileSystem) {
  TempDir dir;
  with_model<OddModel>({3}, [&](ProcessGroups& groups, auto& model) {
    for (const char* suffix : {"m.pt", "m.safetensors"}) {
      OtherHost other;
      FullCheckpointOptions options;
      if (groups.rank() == 2) options.file_system = &other;
      ASSERT_TRUE(save_full_checkpoint(model, dir.file(suffix), options).ok());
      EXPECT_EQ(other.written, 0);
      const State expected = state_of(model);
      if (groups.rank() == 0)
        expect_equal(state_in(dir.file(suffix)), expected);
    }
  });
}

// Any system call of any rank fails: every rank has an error, one with the
// reason, and the old file stays.
TEST(SaveFullCheckpointTest, AnyFaultOnAnyRankLosesNothing) {
  for (int faulty : {0, 1}) {
    TempDir dir;
    with_model<OddModel>({2}, [&](ProcessGroups& groups, auto& model) {
      const bool is_faulty = groups.rank() == faulty;
      const std::string path = dir.file("m.pt");
      FaultFileSystem counter;
      FullCheckpointOptions options;
      options.file_system = &counter;
      ASSERT_TRUE(save_full_checkpoint(model, path, options).ok());
      const std::string old = read_file(path);
      {
        at::NoGradGuard no_grad;
        for (at::Tensor& p : model.parameters()) p.mul_(2);
      }
      const int64_t num_calls = max_over_ranks(
          groups, is_faulty ? counter.num_calls : 0, "the calls of a save");
      ASSERT_GE(num_calls, 3);
      for (int call = 0; call < num_calls; ++call) {
        FaultFileSystem faults;
        if (is_faulty) faults.fail_at = call;
        options.file_system = &faults;
        const absl::Status status = save_full_checkpoint(model, path, options);
        // Only syncing the folder comes after the rename. And a rank that
        // cannot open the file, which rank 0 has created, for its elements
        // leaves the work to rank 0.
        const bool alone = call == (faulty == 0 ? 1 : 0);
        const bool replaced = alone || (faulty == 0 && call == num_calls - 1);
        EXPECT_EQ(read_file(path) == old, !replaced) << call;
        // Rank 0 has removed its temporary file.
        if (groups.rank() == 0) {
          EXPECT_EQ(dir.names().size(), 1u) << call;
        }
        EXPECT_TRUE(PtReader::open(path).value()->verify().ok());
        groups.world()->barrier()->wait();
        if (replaced && groups.rank() == 0) dir.write("m.pt", old);
        groups.world()->barrier()->wait();
        if (alone) {
          EXPECT_TRUE(status.ok()) << status;
          continue;
        }
        EXPECT_THAT(std::string(status.message()),
                    is_faulty ? HasSubstr("No space left")
                              : HasSubstr("m.pt: failed on another rank"));
      }
    });
  }
}

constexpr char kScript[] = R"(
import sys, torch, safetensors.torch
pt = torch.load(sys.argv[1], weights_only=True)
st = safetensors.torch.load_file(sys.argv[2])
assert type(pt).__name__ == "OrderedDict" and list(pt)[0] == "turned", list(pt)
assert set(pt) == set(st), set(pt) ^ set(st)
for name, tensor in pt.items():
    assert torch.equal(tensor, st[name]) and tensor.dtype == st[name].dtype, name
assert pt["turned"].stride() == (1, 7)
assert pt["head.weight"].data_ptr() == pt["layer0.weight"].data_ptr()
torch.save(pt, sys.argv[3])
)";

// Python reads what three ranks wrote, and they read what Python wrote.
TEST(SaveFullCheckpointTest, PythonReadsItAndWritesItBack) {
  if (!have_python()) return;
  TempDir dir;
  const std::string script = dir.write("check.py", kScript);
  with_model<OddModel>({3}, [&](ProcessGroups& groups, auto& model) {
    ASSERT_TRUE(save_full_checkpoint(model, dir.file("m.pt")).ok());
    ASSERT_TRUE(save_full_checkpoint(model, dir.file("m.safetensors")).ok());
    const State expected = state_of(model);
    if (groups.rank() == 0) {
      EXPECT_EQ(run_python(script, absl::StrCat(dir.file("m.pt"), " ",
                                                dir.file("m.safetensors"), " ",
                                                dir.file("python.pt"))),
                0);
    }
    groups.world()->barrier()->wait();
    {
      at::NoGradGuard no_grad;
      for (at::Tensor& p : model.parameters()) p.zero_();
    }
    const auto reader =
        FullStateDictReader::open(dir.file("python.pt")).value();
    const absl::Status loaded = load_full_checkpoint(
        model, [&](const std::string& name) { return reader->tensor(name); });
    EXPECT_TRUE(loaded.ok()) << loaded;
    expect_equal(state_of(model), expected);
  });
}

// --- loading

TEST(LoadFullCheckpointTest, EveryLayoutReadsEachElementOnce) {
  TempDir dir;
  with_model<OddModel>({2}, [&](ProcessGroups&, auto& model) {
    at::NoGradGuard no_grad;
    for (at::Tensor& p : model.parameters()) p.mul_(p.is_complex() ? 3 : 2);
    model.reshard();
    ASSERT_TRUE(save_full_checkpoint(model, dir.file("m.pt")).ok());
    ASSERT_TRUE(save_full_checkpoint(model, dir.file("m.safetensors")).ok());
  });
  for (const Layout& layout : layouts()) {
    with_model<OddModel>(layout, [&](ProcessGroups& groups, auto& model) {
      for (const char* suffix : {"m.pt", "m.safetensors"}) {
        const std::string path = dir.file(suffix);
        const auto reader = open_checkpoint(path).value();
        const auto source =
            [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
          for (size_t i = 0; i < reader->tensors().size(); ++i) {
            if (reader->tensors()[i].name == name) return reader->tensor(i);
          }
          return absl::NotFoundError(name);
        };
        {
          at::NoGradGuard no_grad;
          for (at::Tensor& p : model.parameters()) p.zero_();
        }
        CountingFileSystem counting;
        FileSystem::set_for_readers(&counting);
        const absl::Status status = load_full_checkpoint(model, source);
        FileSystem::set_for_readers(nullptr);
        EXPECT_TRUE(status.ok()) << status;
        expect_equal(state_of(model), state_in(path));
        // "turned" is row-major in safetensors, and mapped there.
        int64_t num_bytes = 0;
        for (const LocalShard& shard : model.local_shards()) {
          const bool mapped =
              shard.name == "turned" && suffix == std::string("m.safetensors");
          if (mapped) continue;
          num_bytes +=
              shard.own_turn ? static_cast<int64_t>(shard.values.nbytes()) : 0;
        }
        EXPECT_EQ(counting.read, num_bytes);
        std::vector<at::Tensor> total = {at::full({1}, counting.read)};
        groups.world()->allreduce(total)->wait();
        int64_t all = 0;
        for (const LocalShard& shard : model.local_shards()) {
          int64_t numel = 1;
          for (int64_t size : shard.sizes) numel *= size;
          all += numel * static_cast<int64_t>(shard.values.element_size());
        }
        EXPECT_LE(total[0].item<int64_t>(), all);
      }
    });
  }
}

// Reads that fail or come short, on one rank.
class FaultyReads : public FileSystem {
 public:
  ssize_t read_at(int fd, void* data, size_t size, int64_t offset) override {
    ++num_calls;
    if (num_calls % 3 == 1) return -EINTR;
    if (num_calls == fail_at) return -EIO;
    return FileSystem::read_at(fd, data, std::min(size, largest), offset);
  }
  int fail_at = -1;
  size_t largest = 7;
  int num_calls = 0;
};

TEST(LoadFullCheckpointTest, ShortReadsGoOnAndFailedOnesAreNamed) {
  TempDir dir;
  with_model<OddModel>({3}, [&](ProcessGroups& groups, auto& model) {
    const std::string path = dir.file("m.pt");
    ASSERT_TRUE(save_full_checkpoint(model, path).ok());
    const State expected = state_of(model);
    const auto reader = FullStateDictReader::open(path).value();
    const auto load = [&] {
      return load_full_checkpoint(
          model, [&](const std::string& name) { return reader->tensor(name); });
    };
    {
      at::NoGradGuard no_grad;
      for (at::Tensor& p : model.parameters()) p.zero_();
    }
    FaultyReads reads;
    FileSystem::set_for_readers(&reads);
    EXPECT_TRUE(load().ok());
    expect_equal(state_of(model), expected);
    FaultyReads broken;
    if (groups.rank() == 1) broken.fail_at = 5;
    FileSystem::set_for_readers(&broken);
    const absl::Status status = load();
    FileSystem::set_for_readers(nullptr);
    EXPECT_THAT(std::string(status.message()),
                groups.rank() == 1
                    ? HasSubstr("cannot read " + path + ": Input/output error")
                    : HasSubstr("failed on another rank"));
    EXPECT_TRUE(load().ok());
    expect_equal(state_of(model), expected);
  });
}

// Every read is announced in its turn, and some before the first one.
TEST(LoadFullCheckpointTest, WhatWillBeReadIsAnnouncedInOrder) {
  for (const Layout& layout : layouts()) {
    with_model<OddModel>(layout, [&](ProcessGroups&, auto& model) {
      const State state = state_of(model);
      std::vector<std::vector<int64_t>> announced, read;
      size_t before_first = 0;
      LoadOptions options;
      options.names = [](const std::string& name) { return name != "frozen"; };
      options.read_ahead = [&](const at::Tensor& tensor, const auto& /*order*/,
                               int64_t begin, int64_t numel) {
        if (read.empty()) ++before_first;
        announced.push_back({tensor.numel(), begin, numel});
      };
      options.read = [&](const at::Tensor& tensor, const auto& order,
                         int64_t begin, at::Tensor out) {
        read.push_back({tensor.numel(), begin, out.numel()});
        EXPECT_GE(announced.size(), read.size());
        return read_elements(tensor, order, begin, out);
      };
      const auto source = [&](const std::string& name) {
        return absl::StatusOr<at::Tensor>(state.at(name));
      };
      ASSERT_TRUE(model.load_full_state_dict(source, options).ok());
      EXPECT_EQ(announced, read);
      size_t num_reads = 0;
      for (const LocalShard& shard : model.local_shards()) {
        num_reads += shard.own_turn && shard.values.numel() > 0 &&
                     shard.name != "frozen";
      }
      EXPECT_EQ(read.size(), num_reads);
      EXPECT_EQ(before_first, num_reads);  // All are small.
      expect_equal(state_of(model), state);
    });
  }
}

TEST(LoadFullCheckpointTest, AFileCutShortUnderTheReaderIsAnError) {
  TempDir dir;
  with_model<Wide>({2}, [&](ProcessGroups& groups, auto& model) {
    const std::string path = dir.file("m.pt");
    ASSERT_TRUE(save_full_checkpoint(model, path).ok());
    const auto reader = FullStateDictReader::open(path).value();
    std::map<std::string, at::Tensor> tensors;
    for (const std::string& name : reader->names()) {
      tensors[name] = reader->tensor(name).value();
    }
    groups.world()->barrier()->wait();
    if (groups.rank() == 0) std::filesystem::resize_file(path, 3000000);
    groups.world()->barrier()->wait();
    // Both ranks have elements beyond.
    const absl::Status status = load_full_checkpoint(
        model, [&](const std::string& name) { return tensors.at(name); });
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("was cut short while it was read: 3000000 bytes"));
  });
}

TEST(LoadFullCheckpointTest, WhatDoesNotFitIsNamedBeforeAnythingChanges) {
  TempDir dir;
  with_model<OddModel>({2}, [&](ProcessGroups&, auto& model) {
    const State before = state_of(model);
    const auto message = [&](const std::string& name, at::Tensor tensor) {
      const absl::Status status = load_full_checkpoint(
          model, [&](const std::string& key) -> absl::StatusOr<at::Tensor> {
            if (key == name && !tensor.defined()) {
              return absl::NotFoundError("no tensor " + key);
            }
            return key == name ? tensor : at::zeros_like(before.at(key));
          });
      expect_equal(state_of(model), before);
      return std::string(status.message());
    };
    EXPECT_THAT(message("unused", {}), HasSubstr("no tensor unused"));
    EXPECT_THAT(message("layer2.bias", at::zeros({8})),
                HasSubstr("'layer2.bias': expected shape [7], got [8]"));
    EXPECT_THAT(message("frozen", at::zeros({5})),
                HasSubstr("'frozen': expected dtype BFloat16, got Float"));
    EXPECT_THAT(message("seen", at::zeros({1})),
                HasSubstr("'seen': expected dtype Long, got Float"));
  });
}

// Files of Hugging Face name a tied weight once.
TEST(LoadFullCheckpointTest, OneNameOfATiedParameterIsEnough) {
  with_model<OddModel>({2}, [&](ProcessGroups&, auto& model) {
    const State before = state_of(model);
    for (const char* missing : {"layer0.weight", "head.weight"}) {
      const absl::Status status = load_full_checkpoint(
          model, [&](const std::string& key) -> absl::StatusOr<at::Tensor> {
            if (key == missing) return absl::NotFoundError(key);
            return at::full_like(before.at(key), 2);
          });
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_TRUE(state_of(model).at(missing).equal(at::full({7, 7}, 2.f)));
    }
  });
}

}  // namespace
}  // namespace fullshard
