#include "fullshard/sharding/gradient_reducer.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/zeros.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/watchdog.h"

namespace fullshard::internal {

GradientReducer::GradientReducer(
    Transport& transport, int num_shards,
    c10::intrusive_ptr<c10d::Backend> replicate_group,
    const ShardOptions& options)
    : transport_(transport),
      scale_(1.0 / options.gradient_divide_factor.value_or(
                       num_shards *
                       (replicate_group ? replicate_group->getSize() : 1))),
      replicate_group_(std::move(replicate_group)),
      options_(options) {}

double predivide_factor(double divide_factor) {
  double factor = 1;
  while (std::fmod(divide_factor, factor) == 0 &&
         divide_factor / factor > factor) {
    factor *= 2;
  }
  return factor;
}

double GradientReducer::predivide(const Unit& unit) const {
  return unit.reduce_dtype == at::kHalf ? predivide_factor(1 / scale_) : 1;
}

bool GradientReducer::has_replicas() const {
  return (replicate_group_ && replicate_group_->getSize() > 1) ||
         options_.all_reduce_hook;
}

void GradientReducer::reduce(Unit& unit,
                             const std::vector<at::Tensor>& gradients) {
  at::NoGradGuard no_grad;
  if (options_.reduce_hook) return reduce_by_hook(unit, gradients);
  make_room();
  char* buffer = transport_.acquire_reduce_buffer(unit);
  Pending pending;
  pending.unit = &unit;
  pending.own.resize(unit.flats.size());
  const bool kept_some = unit.unreduced_gradients.defined();
  if (kept_some) {
    const int64_t num_bytes = unit.reduce_bytes();
    const at::Tensor kept = std::exchange(unit.unreduced_gradients, {});
    at::from_blob(buffer, {num_bytes},
                  at::TensorOptions(kept.device()).dtype(at::kByte))
        .copy_(kept);
    write(unit, gradients, buffer, /*accumulate=*/true, nullptr);
  } else if (transport_.reads_own_gradients() && !gradients.empty()) {
    pending.gradients = gradients;
    write(unit, gradients, buffer, /*accumulate=*/false, &pending.own);
  } else {
    write(unit, gradients, buffer, /*accumulate=*/false, nullptr);
  }
  if (!transport_.sums_in_float() && predivide(unit) != 1) {
    for (size_t i = 0; i < unit.flats.size(); ++i) {
      const FlatParameter& flat = *unit.flats[i];
      if (!flat.placement().trainable) continue;
      at::from_blob(
          buffer + unit.reduce_offset(i), {flat.layout().padded()},
          at::TensorOptions(flat.placement().device).dtype(unit.reduce_dtype))
          .div_(predivide(unit));
    }
  }
  transport_.start_reduce(unit, kept_some || !gradients.empty());
  unit.reduced_this_backward = true;
  pending_.push_back(std::move(pending));
}

void GradientReducer::keep(Unit& unit,
                           const std::vector<at::Tensor>& gradients) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  const bool first = !unit.unreduced_gradients.defined();
  if (first) {
    unit.unreduced_gradients = at::empty(
        {unit.reduce_bytes()},
        at::TensorOptions(unit.flats[0]->placement().device).dtype(at::kByte));
  }
  write(unit, gradients,
        static_cast<char*>(unit.unreduced_gradients.data_ptr()),
        /*accumulate=*/!first, nullptr);
}

void GradientReducer::write(
    Unit& unit, const std::vector<at::Tensor>& gradients, char* buffer,
    bool accumulate,
    std::vector<std::vector<FlatParameter::Piece>>* own) const {
  static const at::Tensor undefined;
  size_t input = 0;
  for (size_t i = 0; i < unit.flats.size(); ++i) {
    const FlatParameter& flat = *unit.flats[i];
    if (!flat.placement().trainable) continue;
    const size_t num_inputs = flat.parameters().size();
    char* at = buffer + unit.reduce_offset(i);
    if (gradients.empty()) {
      const std::vector<at::Tensor> none(num_inputs);
      flat.write_gradients(none.data(), at, unit.reduce_dtype, accumulate);
    } else {
      flat.write_gradients(&gradients[input], at, unit.reduce_dtype, accumulate,
                           own != nullptr ? &(*own)[i] : nullptr);
    }
    input += num_inputs;
  }
}

// With replicas, to finish is a collective too: all ranks must do it at the
// same point, or they wait for each other in a circle.
void GradientReducer::make_room() {
  if (has_replicas()) return flush();
  const auto limit =
      static_cast<size_t>(transport_.max_unfinished_reductions());
  while (!pending_.empty() &&
         (pending_.size() >= limit || transport_.reduction_is_ready())) {
    finish_oldest();
  }
}

void GradientReducer::flush() {
  while (!pending_.empty()) finish_oldest();
}

void GradientReducer::finish_oldest() {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  Pending pending = std::move(pending_.front());
  pending_.pop_front();
  Unit& unit = *pending.unit;
  if (has_replicas()) {
    finish_with_replicas(pending);
    return;
  }
  std::vector<Transport::Reduced> outputs;
  for (size_t i = 0; i < unit.flats.size(); ++i) {
    FlatParameter& flat = *unit.flats[i];
    if (!flat.placement().trainable) continue;
    Transport::Reduced out;
    out.flat = i;
    out.scale = transport_.sums_in_float() ? scale_ : scale_ * predivide(unit);
    out.own = std::move(pending.own[i]);
    if (flat.placement().offload) {
      out.shard = at::empty({flat.layout().chunk},
                            at::TensorOptions(flat.placement().device)
                                .dtype(flat.storage_dtype()));
    } else {
      out.shard = flat.gradient_shard();
      out.accumulate = flat.has_gradient();
    }
    outputs.push_back(std::move(out));
  }
  if (!transport_.finish_reduce(unit, outputs)) return;
  for (const Transport::Reduced& out : outputs) {
    FlatParameter& flat = *unit.flats[out.flat];
    if (flat.placement().offload) add_to_shard(flat, out.shard, /*scale=*/1);
    flat.set_has_gradient(true);
  }
  note_reduced(unit);
}

void GradientReducer::note_reduced(Unit& unit) const {
  if (on_reduced_ && all_reduce_) on_reduced_(unit);
}

void GradientReducer::finish_with_replicas(Pending& pending) {
  Unit& unit = *pending.unit;
  const double scale = transport_.sums_in_float() ? 1 / predivide(unit) : 1;
  std::vector<Transport::Reduced> sums;
  for (size_t i = 0; i < unit.flats.size(); ++i) {
    const FlatParameter& flat = *unit.flats[i];
    if (!flat.placement().trainable) continue;
    sums.push_back({i,
                    at::empty({flat.layout().chunk},
                              at::TensorOptions(flat.placement().device)
                                  .dtype(unit.reduce_dtype)),
                    scale, /*accumulate=*/false, std::move(pending.own[i])});
  }
  // A replica that did not use the unit still takes part, with zeros.
  if (!transport_.finish_reduce(unit, sums)) {
    for (const Transport::Reduced& sum : sums) sum.shard.zero_();
  }
  for (const Transport::Reduced& sum : sums) {
    add_to_gradient(unit, sum.flat, sum.shard);
  }
  note_reduced(unit);
}

void GradientReducer::add_to_gradient(Unit& unit, size_t index,
                                      at::Tensor sum) {
  FlatParameter& flat = *unit.flats[index];
  unit.unreduced_shards.resize(unit.flats.size());
  at::Tensor& kept_back = unit.unreduced_shards[index];
  if (kept_back.defined()) sum.add_(kept_back);
  if (!all_reduce_) {
    kept_back = sum;
    return;
  }
  kept_back = at::Tensor();
  double scale = options_.reduce_hook ? 1 : scale_ * predivide(unit);
  if (options_.all_reduce_hook) {
    options_.all_reduce_hook(unit.name, sum);
    scale = 1;
  } else if (has_replicas()) {
    CollectiveScope scope("all_reduce", &unit.name, 0);
    std::vector<at::Tensor> tensors = {sum};
    replicate_group_->allreduce(tensors)->wait();
  }
  add_to_shard(flat, sum, scale);
  flat.set_has_gradient(true);
}

void GradientReducer::add_to_shard(FlatParameter& flat, const at::Tensor& sum,
                                   double scale) {
  const at::Tensor& shard = flat.gradient_shard();
  if (flat.has_gradient()) {
    shard.add_(sum.to(shard.device()), scale);
  } else {
    shard.copy_(sum);
    if (scale != 1) shard.mul_(scale);
  }
}

void GradientReducer::reduce_by_hook(Unit& unit,
                                     const std::vector<at::Tensor>& gradients) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  keep(unit, gradients);
  at::Tensor all = std::exchange(unit.unreduced_gradients, {});
  unit.reduced_this_backward = true;
  for (size_t i = 0; i < unit.flats.size(); ++i) {
    const FlatParameter& flat = *unit.flats[i];
    if (!flat.placement().trainable) continue;
    const auto options =
        at::TensorOptions(flat.placement().device).dtype(unit.reduce_dtype);
    at::Tensor full = at::from_blob(
        static_cast<char*>(all.data_ptr()) + unit.reduce_offset(i),
        {flat.layout().padded()}, options);
    at::Tensor shard = at::zeros({flat.layout().chunk}, options);
    CollectiveScope scope("reduce hook", &unit.name, 0);
    options_.reduce_hook(unit.name, full, shard);
    add_to_gradient(unit, i, std::move(shard));
  }
  note_reduced(unit);
}

}  // namespace fullshard::internal
