#ifndef FULLSHARD_MODELS_VISION_LANGUAGE_MODEL_H_
#define FULLSHARD_MODELS_VISION_LANGUAGE_MODEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "fullshard/data/batch.h"
#include "torch/nn/module.h"

namespace fullshard {

// What a forward gives to be summed over micro-batches and ranks.
struct LossTerms {
  // Float, 0-dim: cross entropy summed over the targets; carries gradients.
  at::Tensor loss_sum;
  int64_t num_targets = 0;
};

using ModuleList = std::vector<std::shared_ptr<torch::nn::Module>>;

// What a training strategy asks of a vision-language model. Nothing here knows
// of sharding: the model only names its parts.
//
// A model registers its modules under their keys, so that a parameter of module
// M is called "M.<key inside M>".
class VisionLanguageModel : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  // The keys of all modules, in the order in which a full checkpoint has them.
  virtual std::vector<std::string> all_module_keys() const = 0;
  // The keys that the stage trains, in a checkpoint's order. All of them, until
  // freeze_backbones() is called.
  virtual const std::vector<std::string>& trainable_module_keys() const = 0;

  // Sets requires_grad of every parameter as the stage has it, and the modules'
  // train or eval mode. Call before the model is sharded.
  //
  // Errors: kInvalidArgument for an unknown stage; lists the known ones.
  virtual absl::Status freeze_backbones(const std::string& stage) = 0;

  // The modules that make units: each vision block, each vision tower, each
  // layer of the language model, the projector.
  virtual ModuleList unit_modules() = 0;
  // The modules whose activations may be recomputed: the layers of the language
  // model. All are Checkpointable.
  virtual ModuleList checkpoint_modules() = 0;
  virtual std::shared_ptr<torch::nn::Module> vision_tower() = 0;
  virtual bool vision_frozen() const = 0;

  virtual LossTerms forward(const VlmBatch& batch) = 0;

  // Greedy captions of the images, without `eos` and what follows it.
  //
  // Runs each unit in an order that depends on max_new_tokens alone, never on
  // the images, so that ranks with different images stay in step.
  //
  // pixel_values: [images, channels, height, width].
  virtual std::vector<std::vector<int64_t>> generate(
      const at::Tensor& pixel_values, int64_t max_new_tokens, int64_t bos,
      int64_t eos) = 0;
};

}  // namespace fullshard

#endif  // FULLSHARD_MODELS_VISION_LANGUAGE_MODEL_H_
