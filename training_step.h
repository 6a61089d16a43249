#ifndef FULLSHARD_TRAINING_STEP_H_
#define FULLSHARD_TRAINING_STEP_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "c10/core/ScalarType.h"
#include "fullshard/data/batch.h"
#include "fullshard/models/vision_language_model.h"
#include "fullshard/optim/lr_schedule.h"
#include "fullshard/optim/sharded_optimizer.h"
#include "fullshard/precision/sharded_grad_scaler.h"
#include "fullshard/sharding/fully_shard.h"

namespace fullshard {

// How the losses of a step's micro-batches and ranks are put together.
enum class LossWeighting {
  // The mean over targets of each micro-batch, averaged over micro-batches and
  // ranks.
  kMean,
  // Every target of the global batch counts alike.
  kTokens,
};

struct TrainingStepOptions {
  double learning_rate = 2e-5;
  double max_grad_norm = 1;  // 0: no clipping.
  LossWeighting loss_weighting = LossWeighting::kMean;
  std::optional<at::ScalarType> autocast_dtype;
  ShardedGradScaler* scaler = nullptr;  // Null: losses are not scaled.
};

struct StepResult {
  double loss = 0;           // Over all ranks and micro-batches.
  double gradient_norm = 0;  // Before clipping; of the whole model.
  double learning_rate = 0;  // That this step used.
  int64_t num_examples = 0;  // Of all ranks.
  int64_t num_targets = 0;   // Of all ranks.
  bool stop = false;         // Some rank asked to stop.
  bool left_out = false;     // A gradient was infinite; nothing was updated.
};

// Runs optimizer step number `step` (from 0) over this rank's micro-batches of
// one global batch.
//
// Collective: all ranks, with equally many micro-batches. `stop` is this rank's
// wish; the result is the same on all of them.
// Errors: c10::Error of the model or of a peer.
StepResult training_step(FullyShardedModule<VisionLanguageModel>& model,
                         ShardedOptimizer& optimizer,
                         const LrSchedule& schedule,
                         const TrainingStepOptions& options, int64_t step,
                         const std::vector<VlmBatch>& micro_batches, bool stop);

// Returns the loss per target over the batches of all ranks, without gradients.
// Collective; every rank calls it with equally many batches.
double evaluate_loss(FullyShardedModule<VisionLanguageModel>& model,
                     const std::vector<VlmBatch>& batches);

}  // namespace fullshard

#endif  // FULLSHARD_TRAINING_STEP_H_
