#include "fullshard/training_step.h"

#include <algorithm>
#include <limits>

#include "ATen/autocast_mode.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "c10/core/GradMode.h"
#include "fullshard/core/watchdog.h"

namespace fullshard {
namespace {

using Model = FullyShardedModule<VisionLanguageModel>;

// Casts matrix products to `dtype` while alive; nothing if it is unset.
class AutocastGuard {
 public:
  AutocastGuard(c10::DeviceType device, std::optional<at::ScalarType> dtype)
      : device_(device),
        enabled_(at::autocast::is_autocast_enabled(device)),
        dtype_(at::autocast::get_autocast_dtype(device)) {
    if (!dtype.has_value()) return;
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, *dtype);
  }
  ~AutocastGuard() {
    at::autocast::set_autocast_enabled(device_, enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_);
    at::autocast::clear_cache();
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  const c10::DeviceType device_;
  const bool enabled_;
  const at::ScalarType dtype_;
};

// Adds up numbers over all ranks.
std::vector<double> sum_over_ranks(const ProcessGroups& groups,
                                   const std::vector<double>& values) {
  if (groups.world_size() == 1) return values;
  at::Tensor sum = at::tensor(values, at::kDouble).to(groups.device());
  std::vector<at::Tensor> tensors = {sum};
  CollectiveScope scope("all_reduce of step totals", nullptr, 0);
  groups.world()->allreduce(tensors)->wait();
  sum = sum.cpu();
  return std::vector<double>(sum.const_data_ptr<double>(),
                             sum.const_data_ptr<double>() + values.size());
}

// Counts over the global batch, known before its forward.
struct GlobalCounts {
  int64_t num_examples = 0;
  int64_t num_targets = 0;
  bool stop = false;
};

GlobalCounts count(const ProcessGroups& groups,
                   const std::vector<VlmBatch>& micro_batches, bool stop) {
  double examples = 0, targets = 0;
  for (const VlmBatch& batch : micro_batches) {
    examples += static_cast<double>(batch.num_examples());
    targets += static_cast<double>(batch.num_targets());
  }
  const std::vector<double> sums =
      sum_over_ranks(groups, {examples, targets, stop ? 1.0 : 0.0});
  return {static_cast<int64_t>(sums[0]), static_cast<int64_t>(sums[1]),
          sums[2] > 0};
}

// What a micro-batch's summed loss is multiplied by, so that the mean over
// ranks of the gradients' sum is the gradient of the step's loss.
double loss_scale(const TrainingStepOptions& options,
                  const GlobalCounts& counts, const LossTerms& terms,
                  size_t num_micro_batches, int world_size) {
  if (options.loss_weighting == LossWeighting::kTokens) {
    return static_cast<double>(world_size) /
           static_cast<double>(std::max<int64_t>(1, counts.num_targets));
  }
  return 1.0 / static_cast<double>(std::max<int64_t>(1, terms.num_targets)) /
         static_cast<double>(num_micro_batches);
}

}  // namespace

StepResult training_step(Model& model, ShardedOptimizer& optimizer,
                         const LrSchedule& schedule,
                         const TrainingStepOptions& options, int64_t step,
                         const std::vector<VlmBatch>& micro_batches,
                         bool stop) {
  const ProcessGroups& groups = model.groups();
  const GlobalCounts counts = count(groups, micro_batches, stop);
  double local_loss = 0;
  for (size_t i = 0; i < micro_batches.size(); ++i) {
    model.set_requires_gradient_sync(i + 1 == micro_batches.size());
    at::Tensor loss;
    {
      AutocastGuard autocast(groups.device().type(), options.autocast_dtype);
      const LossTerms terms = model(micro_batches[i]);
      loss = terms.loss_sum * loss_scale(options, counts, terms,
                                         micro_batches.size(),
                                         groups.world_size());
    }
    (options.scaler != nullptr ? options.scaler->scale(loss) : loss).backward();
    local_loss += loss.item<double>();
  }

  StepResult result;
  if (options.scaler != nullptr) options.scaler->unscale();
  result.gradient_norm = model.clip_grad_norm(
      options.max_grad_norm > 0 ? options.max_grad_norm
                                : std::numeric_limits<double>::infinity());
  result.learning_rate = options.learning_rate * schedule.factor(step);
  optimizer.set_lr(result.learning_rate);
  if (options.scaler != nullptr) {
    result.left_out = !options.scaler->step(optimizer);
    options.scaler->update();
  } else {
    optimizer.step();
  }
  optimizer.zero_grad();

  result.loss = sum_over_ranks(groups, {local_loss})[0] / groups.world_size();
  result.num_examples = counts.num_examples;
  result.num_targets = counts.num_targets;
  result.stop = counts.stop;
  return result;
}

double evaluate_loss(Model& model, const std::vector<VlmBatch>& batches) {
  at::NoGradGuard no_grad;
  double loss = 0, targets = 0;
  for (const VlmBatch& batch : batches) {
    const LossTerms terms = model(batch);
    loss += terms.loss_sum.item<double>();
    targets += static_cast<double>(terms.num_targets);
  }
  const std::vector<double> sums =
      sum_over_ranks(model.groups(), {loss, targets});
  return sums[0] / std::max(1.0, sums[1]);
}

}  // namespace fullshard
