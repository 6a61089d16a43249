#include "fullshard/optim/sharded_adamw.h"

#include <map>
#include <utility>

#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard {

using internal::FlatParameter;

ShardedAdamW::ShardedAdamW(const ShardedModule& sharded,
                           const AdamWOptions& options)
    : state_(sharded.state()), options_(options) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  for (size_t u = 0; u < state_->units().size(); ++u) {
    for (size_t f = 0; f < state_->units()[u]->flats.size(); ++f) {
      if (state_->units()[u]->flats[f]->placement().trainable) add_flat(u, f);
    }
  }
  state_->optimizer_applies_scale = true;
}

ShardedAdamW::~ShardedAdamW() { state_->optimizer_applies_scale = false; }

void ShardedAdamW::add_flat(size_t unit, size_t flat_index) {
  FlatParameter& flat = *state_->units()[unit]->flats[flat_index];
  const at::Tensor& master = flat.master_shard();
  const at::Tensor first = at::zeros_like(master);
  const at::Tensor second = at::zeros_like(master);
  FlatState state;
  state.unit = unit;
  state.flat = flat_index;
  state.step =
      at::zeros({}, at::TensorOptions(master.device()).dtype(at::kFloat));
  // Where the parameters of this rank begin, with their decay. Padding belongs
  // to the parameter before it; its gradient is zero.
  std::vector<std::pair<int64_t, bool>> starts;
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const ShardLayout::Range range =
        flat.layout().local_range(i, flat.placement().shard_rank);
    if (range.numel == 0) continue;
    const auto& original = flat.parameters()[i];
    const bool decays =
        options_.decays(original.name, original.tensor.sizes().vec());
    if (starts.empty() || starts.back().second != decays) {
      starts.emplace_back(range.shard_offset, decays);
    }
  }
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t begin = starts[i].first;
    const int64_t end =
        i + 1 < starts.size() ? starts[i + 1].first : flat.layout().chunk;
    auto part = [&](const at::Tensor& whole) {
      return whole.narrow(0, begin, end - begin);
    };
    state.runs.push_back({part(master), part(flat.gradient_shard()),
                          part(first), part(second), starts[i].second});
  }
  flats_.push_back(std::move(state));
}

void ShardedAdamW::step() {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  state_->begin_update();
  std::optional<at::Tensor> grad_scale;  // The kernel divides by it.
  const double scale = std::exchange(state_->pending_gradient_scale, 1);
  if (scale != 1) {
    grad_scale = at::full(
        {}, 1 / scale,
        at::TensorOptions(state_->groups().device()).dtype(at::kFloat));
  }
  // The kernel wants lists of one dtype.
  std::map<at::ScalarType, std::vector<FlatState*>> by_dtype;
  for (FlatState& flat_state : flats_) {
    FlatParameter& flat =
        *state_->units()[flat_state.unit]->flats[flat_state.flat];
    if (!flat.has_gradient()) continue;
    flat_state.step.add_(1);
    by_dtype[flat.storage_dtype()].push_back(&flat_state);
  }
  for (const auto& [dtype, flats] : by_dtype) {
    update(flats, /*decays=*/true, grad_scale);
    update(flats, /*decays=*/false, grad_scale);
    for (const FlatState* updated : flats) {
      state_->units()[updated->unit]->flats[updated->flat]->note_update();
    }
  }
}

void ShardedAdamW::update(const std::vector<FlatState*>& flats, bool decays,
                          const std::optional<at::Tensor>& grad_scale) {
  std::vector<at::Tensor> parameters, gradients, first, second, steps;
  for (FlatState* flat : flats) {
    for (const Run& run : flat->runs) {
      if (run.decays != decays) continue;
      parameters.push_back(run.parameter);
      gradients.push_back(run.gradient);
      first.push_back(run.first_moment);
      second.push_back(run.second_moment);
      steps.push_back(flat->step);
    }
  }
  if (parameters.empty()) return;
  at::_fused_adamw_(parameters, gradients, first, second,
                    /*max_exp_avg_sqs=*/{}, steps, options_.lr, options_.beta1,
                    options_.beta2, decays ? options_.weight_decay : 0,
                    options_.eps, /*amsgrad=*/false, /*maximize=*/false,
                    grad_scale);
}

void ShardedAdamW::zero_grad() { state_->zero_grad(); }

}  // namespace fullshard
