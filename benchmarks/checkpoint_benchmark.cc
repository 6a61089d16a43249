// Activation checkpointing on the blocks of a GPT, in one process: time of a
// forward and backward, bytes that forward keeps, and the most that backward
// holds, beside the same model without it. Also what the saved-tensor hooks
// cost for each saved tensor.
//
//   bazel run //benchmarks:checkpoint_benchmark [layers width tokens]
//
// Prints one JSON object per line. Variants are run in turns.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "fullshard/activation_ckpt/checkpointable.h"
#include "fullshard/benchmarks/tiny_gpt.h"
#include "fullshard/core/saved_tensor_hooks.h"
#include "fullshard/tests/testing/allocation_counter.h"

namespace fullshard {
namespace {

constexpr int kRepeats = 15;

double seconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Variant {
  explicit Variant(std::string name, int every = 0,
                   const CheckpointOptions& options = {})
      : name(std::move(name)), every(every), options(options) {}
  std::string name;
  int every = 0;  // 0: no checkpointing.
  CheckpointOptions options;
  std::shared_ptr<benchmarks::TinyGptImpl> model;
  std::vector<double> seconds;
  int64_t kept = 0, peak = 0;
  double loss = 0;
};

void run_blocks(const benchmarks::TinyGptOptions& shape) {
  testing::AllocationCounter allocations;
  CheckpointOptions keeping, offloading, unchecked;
  const double set_up =
      seconds_of([&] { keeping.keep = matmuls_and_attention(); });
  offloading.offload_inputs = true;
  unchecked.determinism_check = false;
  std::vector<Variant> variants = {
      Variant("plain"),
      Variant("checkpoint", 1),
      Variant("checkpoint, no determinism check", 1, unchecked),
      Variant("every 2nd block", 2),
      Variant("selective: matmuls and attention", 1, keeping),
      Variant("inputs offloaded", 1, offloading),
  };
  for (Variant& variant : variants) {
    at::manual_seed(1);
    variant.model = std::make_shared<benchmarks::TinyGptImpl>(shape);
    for (auto& p : variant.model->parameters()) {
      p.mutable_grad() = at::zeros_like(p);
    }
    if (variant.every == 0) continue;
    const auto is_block = [](const std::string&, torch::nn::Module& module) {
      return dynamic_cast<CheckpointSwitch*>(&module) != nullptr;
    };
    (void)apply_activation_checkpointing(
        *variant.model, every_kth(variant.every, is_block), variant.options);
  }
  const at::Tensor tokens = at::arange(shape.tokens)
                                .mul(7)
                                .remainder(shape.vocab)
                                .view({1, shape.tokens});
  const at::Tensor targets = tokens.roll(1, 1);
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (Variant& variant : variants) {
      const int64_t before = allocations.now();
      variant.seconds.push_back(seconds_of([&] {
        const at::Tensor loss = variant.model->forward(tokens, targets);
        variant.kept = allocations.now() - before;
        allocations.reset_peak();
        loss.backward();
        variant.peak = allocations.peak() - before;
        variant.loss = loss.item<double>();
      }));
    }
  }
  for (const Variant& variant : variants) {
    std::vector<double> ratios;  // Of neighbours in time.
    for (int i = 0; i < kRepeats; ++i) {
      ratios.push_back(variant.seconds[i] / variants[0].seconds[i]);
    }
    std::printf(
        "{\"bench\": \"checkpoint_blocks\", \"variant\": \"%s\", \"layers\": "
        "%d, \"width\": %d, \"tokens\": %d, \"ms\": %.2f, \"ratio\": %.3f, "
        "\"kept_mib\": %.2f, \"kept_ratio\": %.3f, \"peak_mib\": %.2f, "
        "\"loss\": %.6f}\n",
        variant.name.c_str(), static_cast<int>(shape.layers),
        static_cast<int>(shape.width), static_cast<int>(shape.tokens),
        1e3 * median(variant.seconds), median(ratios),
        static_cast<double>(variant.kept) / 1048576,
        static_cast<double>(variant.kept) /
            static_cast<double>(variants[0].kept),
        static_cast<double>(variant.peak) / 1048576, variant.loss);
  }
  std::printf("{\"bench\": \"selective_set_up\", \"ms\": %.2f}\n",
              1e3 * set_up);
}

// A chain of operators that save one tensor each.
double nanoseconds_per_save() {
  constexpr int kSaves = 1000;
  const at::Tensor x = at::ones({1}).set_requires_grad(true);
  std::vector<double> seconds;
  for (int repeat = 0; repeat < 200; ++repeat) {
    seconds.push_back(seconds_of([&] {
      at::Tensor y = x;
      for (int i = 0; i < kSaves; ++i) y = y.sin();
      y.backward();
    }));
  }
  return 1e9 * median(seconds) / kSaves;
}

void run_hooks() {
  const double without = nanoseconds_per_save();
  internal::install_engine();
  const double with = nanoseconds_per_save();
  std::printf(
      "{\"bench\": \"saved_tensor_hooks\", \"ns_per_op_without\": %.0f, "
      "\"ns_per_op_with\": %.0f, \"ns_per_saved_tensor\": %.0f}\n",
      without, with, with - without);
}

}  // namespace
}  // namespace fullshard

int main(int argc, char** argv) {
  fullshard::benchmarks::TinyGptOptions shape;
  shape.layers = argc > 1 ? std::stoll(argv[1]) : 8;
  shape.width = argc > 2 ? std::stoll(argv[2]) : 512;
  shape.tokens = argc > 3 ? std::stoll(argv[3]) : 256;
  at::set_num_threads(1);
  fullshard::run_hooks();  // First: the engine is installed once for all.
  fullshard::run_blocks(shape);
  return 0;
}
