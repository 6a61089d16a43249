// Saves or loads a model of square layers some times and prints one line of
// JSON: seconds of each time, bytes, and how much memory it took.
//
//   checkpoint_io_benchmark --op=save_full --world=2 --mib=1024 --folder=DIR
//
// save_full, save_safetensors, save_sharded, save_async (seconds until training
// goes on, and how much longer some steps take while it is under way);
// load_full, load_safetensors, load_sharded, with the file in the page cache,
// or not (--cold); disk_write and disk_read, what the disk gives to plain
// system calls. Everything written is synced.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "ATen/ATen.h"
#include "fullshard/core/launcher.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/full_checkpoint.h"
#include "fullshard/io/full_state_dict.h"
#include "fullshard/io/safetensors.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/training_checkpoints.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {
namespace benchmarks {
namespace {

struct Settings {
  std::string op = "save_full";
  std::string folder = ".";
  int world = 2;
  int64_t mib = 1024;
  int repeats = 3;
  bool cold = false;
};

constexpr int64_t kWidth = 2048;
constexpr int64_t kLayerMib = kWidth * kWidth * 4 >> 20;

struct Layers : torch::nn::Module {
  explicit Layers(int64_t mib) {
    at::manual_seed(1);
    for (int64_t i = 0; i < mib / kLayerMib; ++i) {
      layers.push_back(register_module(
          "layer" + std::to_string(i),
          torch::nn::Linear(
              torch::nn::LinearOptions(kWidth, kWidth).bias(false))));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = x + layer(x);
    return x.mean();
  }
  std::vector<torch::nn::Linear> layers;
};

double seconds_now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double memory_mib(const std::string& field) {
  std::ifstream file("/proc/self/status");
  std::string word;
  double kib = 0;
  while (file >> word) {
    if (word == field + ":") file >> kib;
  }
  return kib / 1024;
}

// Reads the files into the page cache, or drops them from it.
void set_cached(const std::string& folder, bool value) {
  namespace fs = std::filesystem;
  std::vector<char> piece(size_t{1} << 20);
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int fd = ::open(entry.path().c_str(), O_RDONLY);
    TORCH_CHECK(fd >= 0, "cannot open ", entry.path());
    if (value) {
      while (::read(fd, piece.data(), piece.size()) > 0) continue;
    } else {
      ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    }
    ::close(fd);
  }
}

void check(const absl::Status& status) {
  TORCH_CHECK(status.ok(), status.message());
}

// Plain system calls of one process, with and without the page cache.
double write_disk(const std::string& path, int64_t num_bytes, int flags) {
  const int fd =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | flags, 0600);
  TORCH_CHECK(fd >= 0, "cannot create ", path);
  constexpr size_t kPiece = size_t{4} << 20;
  void* const data = std::aligned_alloc(4096, kPiece);
  std::fill_n(static_cast<char*>(data), kPiece, 'x');
  const double start = seconds_now();
  for (int64_t at = 0; at < num_bytes; at += kPiece) {
    TORCH_CHECK(::write(fd, data, kPiece) == static_cast<ssize_t>(kPiece));
  }
  ::fsync(fd);
  const double seconds = seconds_now() - start;
  ::close(fd);
  std::free(data);
  return seconds;
}

double read_disk(const std::string& path, int64_t num_bytes, int flags) {
  const int fd = ::open(path.c_str(), O_RDONLY | flags);
  TORCH_CHECK(fd >= 0, "cannot open ", path);
  constexpr size_t kPiece = size_t{4} << 20;
  void* const data = std::aligned_alloc(4096, kPiece);
  const double start = seconds_now();
  for (int64_t at = 0; at < num_bytes; at += kPiece) {
    TORCH_CHECK(::read(fd, data, kPiece) == static_cast<ssize_t>(kPiece));
  }
  const double seconds = seconds_now() - start;
  ::close(fd);
  std::free(data);
  return seconds;
}

int measure_disk(const Settings& settings) {
  const std::string path = settings.folder + "/disk";
  const int64_t num_bytes = settings.mib << 20;
  nlohmann::json out = {{"op", settings.op}, {"bytes", num_bytes}};
  const bool writes = settings.op == "disk_write";
  if (!writes) write_disk(path, num_bytes, 0);
  for (int i = 0; i < settings.repeats; ++i) {
    for (const int flags : {0, O_DIRECT}) {
      const char* const key = flags == 0 ? "seconds" : "seconds_direct";
      set_cached(settings.folder, false);
      out[key].push_back(writes ? write_disk(path, num_bytes, flags)
                                : read_disk(path, num_bytes, flags));
    }
  }
  std::filesystem::remove(path);
  std::printf("%s\n", out.dump().c_str());
  return 0;
}

class Job {
 public:
  Job(const Settings& settings, ProcessGroups groups)
      : settings_(settings), groups_(std::move(groups)), model_(make_model()) {
    if (!is("sharded") && !is("async")) return;
    optimizer_ = std::make_unique<ShardedAdamW>(model_, AdamWOptions());
    train(1);
    if (!is("async")) optimizer_->zero_grad(/*set_to_none=*/true);
  }

  void run() {
    if (is("load")) save();  // What will be loaded.
    if (is("async")) {       // The buffer's pages are there from now on.
      save();
      check(checkpoints_->wait());
    }
    nlohmann::json out = {{"op", settings_.op},
                          {"world", settings_.world},
                          {"cold", settings_.cold},
                          {"bytes", num_bytes()}};
    for (int i = 0; i < settings_.repeats; ++i) {
      if (is("load") && groups_.rank() == 0) {
        set_cached(settings_.folder, !settings_.cold);
      }
      groups_.world()->barrier()->wait();
      std::ofstream("/proc/self/clear_refs") << "5";
      const double resident = memory_mib("VmRSS");
      if (is("async")) {
        measure_async(out);
      } else {
        out["seconds"].push_back(once());
      }
      out["extra_mib"].push_back(memory_mib("VmHWM") - resident);
    }
    if (groups_.rank() == 0) std::printf("%s\n", out.dump().c_str());
  }

 private:
  bool is(const char* part) const {
    return settings_.op.find(part) != std::string::npos;
  }
  FullyShardedModule<Layers> make_model() const {
    ShardOptions options;
    options.wrap_policy = module_type<torch::nn::LinearImpl>();
    return fully_shard(std::make_shared<Layers>(settings_.mib), groups_,
                       options)
        .value();
  }
  std::string path() const {
    return settings_.folder + (is("safetensors") ? "/m.safetensors" : "/m.pt");
  }
  // Of all ranks.
  int64_t num_bytes() const {
    const int64_t parameters = settings_.mib / kLayerMib * kLayerMib << 20;
    return optimizer_ == nullptr ? parameters : 3 * parameters;
  }

  // Seconds of some steps of all ranks.
  double train(int steps) {
    const double start = seconds_now();
    for (int i = 0; i < steps; ++i) {
      model_(at::ones({16, kWidth})).backward();
      optimizer_->step();
      optimizer_->zero_grad();
    }
    groups_.world()->barrier()->wait();
    return seconds_now() - start;
  }

  void measure_async(nlohmann::json& out) {
    constexpr int kSteps = 4;
    const double alone = train(kSteps);
    const double start = seconds_now();
    save();
    groups_.world()->barrier()->wait();
    out["seconds"].push_back(seconds_now() - start);
    train(kSteps);
    out["delay_seconds"].push_back(seconds_now() - start - alone);
    check(checkpoints_->wait());
    groups_.world()->barrier()->wait();
  }

  void save() {
    if (is("async")) {
      if (checkpoints_ == nullptr) {
        TrainingCheckpointsOptions options;
        options.copy_in_background = true;
        checkpoints_ = std::make_unique<TrainingCheckpoints>(
            settings_.folder, model_, optimizer_.get(), options);
      }
      check(checkpoints_->save_async(1, {}).status());
    } else if (is("sharded")) {
      TrainingCheckpoints checkpoints(settings_.folder, model_,
                                      optimizer_.get());
      check(checkpoints.save(1, {}).status());
    } else {
      check(save_full_checkpoint(model_, path()));
    }
  }

  void load() {
    if (is("sharded")) {
      TrainingCheckpoints checkpoints(settings_.folder, model_,
                                      optimizer_.get());
      check(checkpoints.load(settings_.folder + "/latest").status());
    } else if (is("safetensors")) {
      const auto reader = SafetensorsReader::open(path()).value();
      check(load_full_checkpoint(model_, [&](const std::string& name) {
        return reader->tensor(name);
      }));
    } else {
      const auto reader = FullStateDictReader::open(path()).value();
      check(load_full_checkpoint(model_, [&](const std::string& name) {
        return reader->tensor(name);
      }));
    }
  }

  // Seconds until every rank is done.
  double once() {
    const double start = seconds_now();
    if (is("load")) {
      load();
    } else {
      save();
    }
    groups_.world()->barrier()->wait();
    return seconds_now() - start;
  }

  const Settings settings_;
  ProcessGroups groups_;
  FullyShardedModule<Layers> model_;
  std::unique_ptr<ShardedAdamW> optimizer_;
  std::unique_ptr<TrainingCheckpoints> checkpoints_;
};

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equals = arg.find('=');
    const std::string key = arg.substr(0, equals);
    const std::string value =
        equals == std::string::npos ? "" : arg.substr(equals + 1);
    if (key == "--op")
      settings.op = value;
    else if (key == "--folder")
      settings.folder = value;
    else if (key == "--world")
      settings.world = std::stoi(value);
    else if (key == "--mib")
      settings.mib = std::stoll(value);
    else if (key == "--repeats")
      settings.repeats = std::stoi(value);
    else if (key == "--cold")
      settings.cold = true;
    else
      std::fprintf(stderr, "unknown option %s\n", arg.c_str()), std::exit(2);
  }
  return settings;
}

}  // namespace
}  // namespace benchmarks
}  // namespace fullshard

int main(int argc, char** argv) {
  using namespace fullshard;  // NOLINT
  const benchmarks::Settings settings = benchmarks::parse(argc, argv);
  if (settings.op.rfind("disk", 0) == 0) {
    return benchmarks::measure_disk(settings);
  }
  LauncherOptions options;
  options.num_ranks = settings.world;
  options.threads_per_rank = 1;
  return launch_ranks(options, [&](const LaunchEnv& env) {
    benchmarks::Job(settings, init_process_groups(env).value()).run();
    return 0;
  });
}
