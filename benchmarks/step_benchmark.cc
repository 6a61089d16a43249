// Trains the tiny GPT for some steps and prints one line of JSON: losses, the
// gradient norm of the first step, and times.
//
//   step_benchmark --world=2 --tokens=64 --steps=20 --mode=fsdp
//
// mode floor: the same ranks without any synchronisation or sharding, each
// with the whole optimizer. It shares the machine alike, and computes what
// sharding cannot avoid.

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "ATen/Parallel.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "fullshard/benchmarks/tiny_gpt.h"
#include "fullshard/core/launcher.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/optim/sharded_adamw.h"
#include "fullshard/sharding/fully_shard.h"

namespace fullshard {
namespace benchmarks {
namespace {

struct Settings {
  TinyGptOptions model;
  int world = 2;
  int steps = 20;
  int warmup = 3;
  double clip = 0;
  std::string mode = "fsdp";
  std::string strategy = "full-shard";
  std::string backend;
  bool checkpoint = false;
  bool bf16 = false;
};

constexpr double kLearningRate = 1e-3, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8,
                 kWeightDecay = 0.1;

double seconds_now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t minor_faults() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// Proportional set size of this process in MiB.
double pss_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  double kib = 0;
  while (file >> word) {
    if (word == "Pss:") {
      file >> kib;
      break;
    }
  }
  return kib / 1024;
}

// What a mode does in a step, beside the forward.
class Trainer {
 public:
  virtual ~Trainer() = default;
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& y) = 0;
  virtual double gradient_norm() = 0;
  virtual void clip_and_step(double max_norm) = 0;
};

class ShardedTrainer final : public Trainer {
 public:
  ShardedTrainer(std::shared_ptr<TinyGptImpl> model, ProcessGroups& groups,
                 const Settings& settings)
      : sharded_(shard(std::move(model), groups, settings)),
        optimizer_(sharded_, adamw()) {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) override {
    return sharded_(x, y);
  }
  double gradient_norm() override {
    return sharded_.clip_grad_norm(std::numeric_limits<double>::infinity());
  }
  void clip_and_step(double max_norm) override {
    if (max_norm > 0) sharded_.clip_grad_norm(max_norm);
    optimizer_.step();
    optimizer_.zero_grad();
  }

 private:
  static FullyShardedModule<TinyGptImpl> shard(
      std::shared_ptr<TinyGptImpl> model, ProcessGroups& groups,
      const Settings& settings) {
    ShardOptions options;
    options.wrap_policy = module_type<TinyBlockImpl>();
    if (settings.strategy == "shard-grad-op") {
      options.strategy = ShardingStrategy::kShardGradOp;
    }
    if (settings.bf16) {
      options.mixed_precision.param_dtype = at::kBFloat16;
      options.mixed_precision.reduce_dtype = at::kFloat;
    }
    auto sharded = fully_shard(std::move(model), groups, options);
    TORCH_CHECK(sharded.ok(), sharded.status().ToString());
    return std::move(sharded).value();
  }
  static AdamWOptions adamw() {
    AdamWOptions options;
    options.lr = kLearningRate;
    options.beta1 = kBeta1;
    options.beta2 = kBeta2;
    options.eps = kEps;
    options.weight_decay = kWeightDecay;
    // As the peer: everything decays.
    options.decays = [](const std::string&, const std::vector<int64_t>&) {
      return true;
    };
    return options;
  }

  FullyShardedModule<TinyGptImpl> sharded_;
  ShardedAdamW optimizer_;
};

class FloorTrainer final : public Trainer {
 public:
  explicit FloorTrainer(std::shared_ptr<TinyGptImpl> model)
      : model_(std::move(model)), parameters_(model_->parameters()) {
    for (const at::Tensor& p : parameters_) {
      first_.push_back(at::zeros_like(p));
      second_.push_back(at::zeros_like(p));
      steps_.push_back(at::zeros({}));
    }
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) override {
    return model_->forward(x, y);
  }
  double gradient_norm() override {
    double squares = 0;
    for (const at::Tensor& p : parameters_) {
      squares += p.grad().to(at::kDouble).pow(2).sum().item<double>();
    }
    return std::sqrt(squares);
  }
  void clip_and_step(double) override {
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& p : parameters_) gradients.push_back(p.grad());
    for (at::Tensor& step : steps_) step.add_(1);
    at::_fused_adamw_(parameters_, gradients, first_, second_, {}, steps_,
                      kLearningRate, kBeta1, kBeta2, kWeightDecay, kEps, false,
                      false);
    for (at::Tensor& p : parameters_) p.mutable_grad() = at::Tensor();
  }

 private:
  std::shared_ptr<TinyGptImpl> model_;
  std::vector<at::Tensor> parameters_, first_, second_, steps_;
};

double mean_over_ranks(const ProcessGroups& groups, double value) {
  at::Tensor sum = at::full({1}, value, at::kDouble);
  std::vector<at::Tensor> tensors = {sum};
  groups.world()->allreduce(tensors)->wait();
  return sum.item<double>() / groups.world_size();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run_rank(const Settings& settings, const LaunchEnv& env, double start) {
  at::set_num_threads(1);
  ProcessGroupsOptions options;
  options.backend = settings.backend;
  auto groups = init_process_groups(env, options);
  TORCH_CHECK(groups.ok(), groups.status().ToString());
  const double base_pss = pss_mib();
  auto model = std::make_shared<TinyGptImpl>(settings.model);
  if (settings.checkpoint) {
    (void)apply_activation_checkpointing(
        *model, [](const std::string&, torch::nn::Module& module) {
          return dynamic_cast<TinyBlockImpl*>(&module) != nullptr;
        });
  }
  std::unique_ptr<Trainer> trainer;
  if (settings.mode == "floor") {
    trainer = std::make_unique<FloorTrainer>(model);
  } else {
    trainer = std::make_unique<ShardedTrainer>(model, *groups, settings);
  }
  std::vector<double> losses, times;
  double norm = 0, first_step = 0;
  int64_t faults = 0;
  for (int step = 0; step < settings.warmup + settings.steps; ++step) {
    if (step == settings.warmup) {
      groups->world()->barrier()->wait();
      faults = minor_faults();
    }
    const double begin = seconds_now();
    const auto [x, y] =
        tiny_gpt_batch(settings.model, step, env.rank, env.world_size);
    at::Tensor loss = trainer->forward(x, y);
    loss.backward();
    if (step == 0) norm = trainer->gradient_norm();
    trainer->clip_and_step(settings.clip);
    losses.push_back(loss.item<double>());
    if (step == 0) first_step = seconds_now() - start;
    if (step >= settings.warmup) times.push_back(seconds_now() - begin);
  }
  faults = (minor_faults() - faults) / settings.steps;
  const double pss = pss_mib();
  for (double& loss : losses) {
    loss = std::round(mean_over_ranks(*groups, loss) * 1e5) / 1e5;
  }
  if (env.rank == 0) {
    nlohmann::ordered_json out;
    out["bench"] = "fullshard_step";
    out["mode"] = settings.mode;
    out["strategy"] = settings.strategy;
    out["backend"] = groups->backend();
    out["world"] = env.world_size;
    out["tokens"] = settings.model.tokens;
    out["dtype"] = settings.bf16 ? "bf16" : "fp32";
    out["checkpoint"] = settings.checkpoint;
    out["clip"] = settings.clip;
    out["step_ms"] = {
        {"median", median(times) * 1e3},
        {"min", *std::min_element(times.begin(), times.end()) * 1e3},
        {"n", times.size()}};
    out["grad_norm0"] = std::round(norm * 1e6) / 1e6;
    out["losses"] = losses;
    out["faults_per_step"] = faults;
    out["pss_over_base_mib"] = pss - base_pss;
    out["first_step_s"] = first_step;
    std::printf("%s\n", out.dump().c_str());
    std::fflush(stdout);
  }
  return 0;
}

// "--key=value"; false if the key is unknown.
bool parse(const std::string& argument, Settings& settings) {
  const size_t equals = argument.find('=');
  const std::string key = argument.substr(0, equals);
  const std::string value =
      equals == std::string::npos ? "" : argument.substr(equals + 1);
  if (key == "--world")
    settings.world = std::stoi(value);
  else if (key == "--tokens")
    settings.model.tokens = std::stoi(value);
  else if (key == "--layers")
    settings.model.layers = std::stoi(value);
  else if (key == "--steps")
    settings.steps = std::stoi(value);
  else if (key == "--warmup")
    settings.warmup = std::stoi(value);
  else if (key == "--clip")
    settings.clip = std::stod(value);
  else if (key == "--mode")
    settings.mode = value;
  else if (key == "--strategy")
    settings.strategy = value;
  else if (key == "--backend")
    settings.backend = value;
  else if (key == "--checkpoint")
    settings.checkpoint = true;
  else if (key == "--bf16")
    settings.bf16 = true;
  else
    return false;
  return true;
}

}  // namespace
}  // namespace benchmarks
}  // namespace fullshard

int main(int argc, char** argv) {
  const double start = fullshard::benchmarks::seconds_now();
  fullshard::benchmarks::Settings settings;
  for (int i = 1; i < argc; ++i) {
    if (!fullshard::benchmarks::parse(argv[i], settings)) {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  fullshard::LauncherOptions options;
  options.num_ranks = settings.world;
  options.threads_per_rank = 1;
  return fullshard::launch_ranks(options, [&](const fullshard::LaunchEnv& env) {
    return fullshard::benchmarks::run_rank(settings, env, start);
  });
}
