#include "fullshard/sharding/sharded_state.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "ATen/record_function.h"
#include "c10/core/GradMode.h"
#include "fullshard/core/shm_backend.h"
#include "fullshard/core/single_backend.h"
#include "fullshard/core/watchdog.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/function.h"

namespace fullshard::internal {
namespace {

namespace ag = torch::autograd;

// The gradient edge of all trainable parameters of a unit. Autograd calls it
// once per backward, with all their gradients, when the last is ready.
class Sink final : public ag::Node {
 public:
  Sink(std::weak_ptr<ShardedState> state, Unit* unit)
      // As AccumulateGrad: runs as soon as it is ready.
      : Node(/*sequence_nr=*/UINT64_MAX),
        state_(std::move(state)),
        unit_(unit),
        name_("FullShardSink(" + unit->name + ")") {}

  ag::variable_list apply(ag::variable_list&& gradients) override {
    std::shared_ptr<ShardedState> state = state_.lock();
    TORCH_CHECK(state, name_,
                ": the FullyShardedModule was destroyed before "
                "backward");
    state->on_gradients(*unit_, std::move(gradients));
    return {};
  }
  std::string name() const override { return name_; }

 private:
  const std::weak_ptr<ShardedState> state_;
  Unit* const unit_;
  const std::string name_;
};

bool contains(c10::ArrayRef<Unit*> set, const Unit* unit) {
  return std::find(set.begin(), set.end(), unit) != set.end();
}

bool uses_shared_memory(const ProcessGroups::Group& group) {
  return group->getSize() > 1 && ProcessGroups::shm(group) != nullptr;
}

}  // namespace

std::shared_ptr<ShardedState> ShardedState::create(
    ProcessGroups groups, const ShardOptions& options,
    std::vector<std::unique_ptr<Unit>> units, std::vector<at::Tensor> ignored) {
  std::shared_ptr<ShardedState> state(new ShardedState(
      std::move(groups), options, std::move(units), std::move(ignored)));
  for (const auto& unit : state->units_) {
    unit->model = state.get();
    state->attach_sinks(*unit);
  }
  state->start_order_anew();
  state->observing_ = observe_backward(state.get());
  return state;
}

ShardedState::ShardedState(ProcessGroups groups, const ShardOptions& options,
                           std::vector<std::unique_ptr<Unit>> units,
                           std::vector<at::Tensor> ignored)
    : groups_(std::move(groups)),
      options_(options),
      units_(std::move(units)),
      ignored_(std::move(ignored)) {
  if (options_.strategy == ShardingStrategy::kNoShard) {
    shard_group_ = c10::make_intrusive<SingleBackend>();
    replicate_group_ = groups_.world();
  } else {
    shard_group_ = groups_.shard_group();
    replicate_group_ = groups_.replicate_group();
  }
  make_transport();
}

void ShardedState::make_transport() {
  reducer_.reset();
  transport_.reset();
  for (const auto& unit : units_) {
    for (const auto& flat : unit->flats) flat->leave_shared_memory();
  }
  transport_ = uses_shared_memory(shard_group_)
                   ? make_shared_memory_transport(
                         *ProcessGroups::shm(shard_group_), units_)
                   : make_collective_transport(groups_, shard_group_, units_);
  reducer_ = std::make_unique<GradientReducer>(
      *transport_, shard_group_->getSize(), replicate_group_, options_);
  reducer_->set_all_reduce(all_reduce_);
  reducer_->set_on_reduced(on_reduced_);
  for (const auto& unit : units_) {
    for (const auto& flat : unit->flats) {
      if (flat->handed_out()) flat->own_master();
    }
  }
  gathers_communicate_ =
      shard_group_->getSize() > 1 &&
      std::any_of(units_.begin(), units_.end(), [this](const auto& unit) {
        return !transport_->shares_masters(*unit);
      });
}

void ShardedState::attach_sinks(Unit& unit) {
  uint32_t num_inputs = 0;
  for (const auto& flat : unit.flats) {
    flat->unit = &unit;
    flat->on_touch = [this, u = &unit] { touch({u}); };
    if (!flat->placement().trainable) continue;
    if (options_.mixed_precision.keep_low_precision_grads &&
        c10::elementSize(unit.reduce_dtype) <
            c10::elementSize(flat->storage_dtype())) {
      flat->set_gradient_dtype(unit.reduce_dtype);
    }
    if (!unit.sink) {
      unit.sink = std::make_shared<Sink>(weak_from_this(), &unit);
    }
    flat->attach_sink(unit.sink, num_inputs);
    num_inputs += static_cast<uint32_t>(flat->parameters().size());
  }
}

void ShardedState::set_full_precision(bool value) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  begin_update();
  for (const auto& unit : units_) {
    for (const auto& flat : unit->flats) flat->set_full_precision(value);
  }
  full_precision_ = value;
  make_transport();
}

ShardedState::~ShardedState() {
  observing_.reset();
  for (const auto& unit : units_) {
    for (const auto& flat : unit->flats) flat->detach();
  }
}

bool ShardedState::nothing_to_do(c10::ArrayRef<Unit*> set) const {
  return set.size() == 1 && set[0] == last_touched_ && !set[0]->watched &&
         (set[0]->used_in_forward ||
          prefetcher_.phase() == Prefetcher::kBackward) &&
         set[0]->state == UnitState::kUnsharded &&
         set[0]->gathered_generation == set[0]->generation() &&
         recompute_token().expired();
}

void ShardedState::touch(c10::ArrayRef<Unit*> set) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (nothing_to_do(set)) return;
  for (Unit* unit : set) note_use(*unit);
  touched_ = true;
  reshard_others(set);
  bool gathered = false;
  for (Unit* unit : set) {
    if (is_stale(*unit)) reshard(*unit);
    stop_watching(*unit);
    if (unit->state == UnitState::kUnsharded) continue;
    if (order_.complete() && prefetcher_.phase() == Prefetcher::kBackward) {
      if (unit->state == UnitState::kSharded) gather_in_order(*unit);
    } else {
      take_part_in(prefetcher_.advance_to(unit->index), set);
    }
    start_gather(*unit);
    gathered = true;
  }
  for (Unit* unit : set) {
    finish_gather(*unit);
    if (!recompute_token().expired()) unit->keeper = recompute_token();
  }
  last_touched_ = set.back();
  if (gathered) prefetch_next(set);
  throw_misuse();
}

// A watched unit may have changed, unless its backward has begun: then a change
// would be an error without sharding too.
bool ShardedState::is_stale(const Unit& unit) const {
  if (unit.state == UnitState::kSharded) return false;
  return unit.gathered_generation != unit.generation() ||
         (unit.watched && prefetcher_.phase() == Prefetcher::kForward &&
          !unit.has_views());
}

void ShardedState::stop_watching(Unit& unit) {
  if (!std::exchange(unit.watched, false)) return;
  if (unit.state != UnitState::kUnsharded) return;
  for (size_t i = 0; i < unit.flats.size(); ++i) {
    unit.flats[i]->page_in(unit.slot.memory + unit.slot_offset(i));
  }
}

void ShardedState::reshard_others(c10::ArrayRef<Unit*> set) {
  // Backwards: reshard() removes the unit from the list.
  for (size_t i = present_.size(); i-- > 0;) {
    Unit& unit = *present_[i];
    if (unit.state != UnitState::kUnsharded || !unit.reshard_after_forward ||
        unit.pinned || contains(set, &unit) || !unit.keeper.expired() ||
        unit.has_views()) {
      continue;
    }
    const bool related = std::any_of(
        set.begin(), set.end(),
        [&](const Unit* touched) { return touched->related_to(unit); });
    if (!related) reshard(unit, in_training_forward_);
  }
}

void ShardedState::take_part_in(const std::vector<int>& skipped,
                                c10::ArrayRef<Unit*> set) {
  for (int index : skipped) {
    Unit& unit = *units_[static_cast<size_t>(index)];
    if (contains(set, &unit) || unit.state == UnitState::kUnsharded) continue;
    start_gather(unit);
    transport_->finish_gather(unit);
    unit.state = UnitState::kUnsharded;  // Nothing was paged in.
    reshard(unit, in_training_forward_);
  }
}

void ShardedState::take_part_in_rest() {
  if (shard_group_->getSize() > 1) take_part_in(prefetcher_.take_rest(), {});
}

void ShardedState::start_gather(Unit& unit) {
  if (unit.state != UnitState::kSharded) return;
  if (prefetcher_.phase() == Prefetcher::kBackward || in_training_forward_ ||
      at::GradMode::is_enabled()) {
    prefetcher_.record(unit.index);
  }
  if (prefetcher_.phase() == Prefetcher::kBackward &&
      !transport_->shares_masters(unit)) {
    issued_.push_back({unit.index, /*reduces=*/false});
  }
  note_misuse(unit);
  unit.gathered_generation = unit.generation();
  transport_->start_gather(unit);
  unit.state = UnitState::kGathering;
  present_.push_back(&unit);
}

void ShardedState::finish_gather(Unit& unit) {
  if (unit.state != UnitState::kGathering) return;
  RECORD_FUNCTION("FullShard::unshard " + unit.name,
                  std::vector<c10::IValue>());
  transport_->finish_gather(unit);
  for (size_t i = 0; i < unit.flats.size(); ++i) {
    unit.flats[i]->page_in(unit.slot.memory + unit.slot_offset(i));
  }
  unit.state = UnitState::kUnsharded;
}

void ShardedState::reshard(Unit& unit, bool until_backward) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (unit.state == UnitState::kSharded) return;
  if (unit.state == UnitState::kGathering) transport_->finish_gather(unit);
  note_misuse(unit);
  for (const auto& flat : unit.flats) flat->page_out();
  transport_->release(unit, until_backward);
  unit.keeper.reset();
  unit.watched = unit.pinned = false;
  unit.state = UnitState::kSharded;
  present_.erase(std::find(present_.begin(), present_.end(), &unit));
  if (last_touched_ == &unit) last_touched_ = nullptr;
}

void ShardedState::reshard_all() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  while (!present_.empty()) reshard(*present_.back());
}

void ShardedState::notify_before_update() {
  for (ShardedStateObserver* observer : observers_) observer->before_update();
}

void ShardedState::begin_update() {
  notify_before_update();
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  while (!present_.empty()) reshard(*present_.back());
  if (transport_->reading()) transport_->leave_reads("reshard");
}

void ShardedState::start_unshard(Unit& unit) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  at::NoGradGuard no_part_of_the_order;
  if (is_stale(unit)) reshard(unit);
  stop_watching(unit);
  unit.pinned = true;
  start_gather(unit);
}

void ShardedState::finish_unshard(Unit& unit) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  finish_gather(unit);
  throw_misuse();
}

void ShardedState::prefetch_next(c10::ArrayRef<Unit*> set) {
  for (Unit* unit : set) {
    for (Unit* next : unit->prefetch[prefetcher_.phase()]) start_gather(*next);
  }
  if (!options_.prefetch) return;
  const bool in_flight = std::any_of(
      present_.begin(), present_.end(),
      [](const Unit* u) { return u->state == UnitState::kGathering; });
  if (in_flight) return;
  if (order_.complete() && prefetcher_.phase() == Prefetcher::kBackward) {
    const Issue* next = order_.next();
    if (next != nullptr && !next->reduces) issue(order_.take());
    return;
  }
  const int next = prefetcher_.next();
  if (next >= 0) start_gather(*units_[static_cast<size_t>(next)]);
}

void ShardedState::note_misuse(Unit& unit) {
  std::string message = unit.misuse();
  if (misuse_.empty()) misuse_ = std::move(message);
}

void ShardedState::throw_misuse() {
  if (misuse_.empty()) return;
  const std::string message = std::exchange(misuse_, "");
  TORCH_CHECK(false, message);
}

void ShardedState::begin_forward() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (joining_ && !shadowing_ && at::GradMode::is_enabled()) announce(true);
  if (std::exchange(forward_failed_, false)) {
    reshard_all();
    prefetcher_.restart_recording();
    prefetcher_.begin(Prefetcher::kForward);
  }
  // After a forward whose backward did not come, values may have changed.
  if (transport_->reading()) {
    transport_->leave_reads("begin of forward");
    transport_->enter_reads();
    for (Unit* unit : present_) transport_->finish_gather(*unit);
  } else {
    transport_->enter_reads();
  }
  for (const auto& unit : units_) {
    note_misuse(*unit);
    const bool early = unit->state == UnitState::kGathering;
    if (is_stale(*unit) || (early && unit->handed_out())) reshard(*unit);
    stop_watching(*unit);
  }
  throw_misuse();
  in_training_forward_ = at::GradMode::is_enabled();
  if (in_training_forward_ && forward_is_new_) begin_uses();
  if (in_training_forward_) prefetcher_.note_forward();
  // Forwards that share a backward continue one order.
  if (!in_training_forward_) prefetcher_.begin(Prefetcher::kForward);
}

void ShardedState::end_forward() {
  in_training_forward_ = false;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (at::GradMode::is_enabled()) {
    keep_present();
    return;
  }
  take_part_in_rest();
  reshard_all();
  transport_->leave_reads("end of forward");
  prefetcher_.begin(Prefetcher::kForward);
}

// Units stay unsharded after a forward or backward. To gather one with shared
// masters again costs nothing, and finds out if its values changed; one that
// the user may write to unnoticed is watched.
void ShardedState::keep_present() {
  for (size_t i = present_.size(); i-- > 0;) {
    Unit& unit = *present_[i];
    if (unit.state != UnitState::kUnsharded) continue;
    if (unit.slot.shared_masters && !unit.has_views()) {
      reshard(unit);
    } else if (unit.handed_out()) {
      for (const auto& flat : unit.flats) flat->watch();
      unit.watched = true;
    }
  }
}

void ShardedState::forward_failed() noexcept {
  in_training_forward_ = false;
  forward_failed_ = true;
}

void ShardedState::on_gradients(Unit& unit,
                                std::vector<at::Tensor>&& gradients) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  RECORD_FUNCTION("FullShard::reduce " + unit.name, std::vector<c10::IValue>());
  sink_ran_ = true;
  if (pending_gradient_scale != 1) apply_pending_scale();
  unit.keeper.reset();
  if (gradient_sync_) {
    reduce_in_order(unit, gradients);
  } else {
    reducer_->keep(unit, gradients);
  }
  if (reshard_after_backward_ && !unit.pinned && !unit.has_views()) {
    reshard(unit);
  }
}

void ShardedState::zero_grad(bool set_to_none) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (set_to_none) {
    for (ShardedStateObserver* observer : observers_) {
      observer->before_gradients_are_freed();
    }
  }
  for (const auto& unit : units_) {
    unit->unreduced_gradients = at::Tensor();
    unit->unreduced_shards.clear();
    for (const auto& flat : unit->flats) {
      if (!flat->placement().trainable) continue;
      flat->set_has_gradient(false);
      if (set_to_none) flat->free_gradient();
    }
  }
  for (const at::Tensor& parameter : ignored_) {
    parameter.mutable_grad() = at::Tensor();
  }
  pending_gradient_scale = 1;
}

void ShardedState::apply_pending_scale() {
  at::NoGradGuard no_grad;
  const double scale = std::exchange(pending_gradient_scale, 1);
  if (scale == 1) return;
  for (const auto& unit : units_) {
    for (const auto& flat : unit->flats) {
      if (flat->has_gradient()) flat->gradient_shard().mul_(scale);
    }
  }
}

void ShardedState::before_backward(const std::vector<ag::Edge>& outputs,
                                   bool create_graph, bool accumulate_grad) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (const ag::Edge& edge : outputs) {
    TORCH_CHECK(
        !accumulate_grad || dynamic_cast<Sink*>(edge.function.get()) == nullptr,
        "backward(inputs = {a sharded parameter}) is not supported; "
        "use torch::autograd::grad for its local gradient");
  }
  // Without units present no forward of this model is open, and this is
  // another model's backward or the second one of a retained graph.
  const bool expected = !present_.empty();
  TORCH_CHECK(!(expected && create_graph && accumulate_grad),
              "backward(create_graph = true) through a sharded module is not "
              "supported; use torch::autograd::grad(..., create_graph = true)");
  if (ag::get_current_graph_task_id() >= 0) return;  // A reentrant one.
  sink_ran_ = false;
  touched_ = false;
  if (expected) take_part_in_rest();
  prefetcher_.begin(Prefetcher::kBackward);
  order_.begin();
  issued_.clear();
  if (expected && prefetcher_.recorded()) prefetch_next({});
}

void ShardedState::after_backward(bool ok) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  // A backward that failed may have stopped before it reached a unit.
  const bool took_part = sink_ran_ || touched_ || !ok;
  if (took_part && ok) finish_order();
  prefetcher_.begin(Prefetcher::kForward);
  if (!took_part) return;
  forward_is_new_ = true;
  reducer_->flush();
  if (ok && sink_ran_ && gradient_sync_) adopt_order();
  if (ok && gradient_sync_) average_ignored_gradients();
  if (reshard_after_backward_ || !ok) {
    reshard_all();
  } else {
    keep_present();
  }
  transport_->forget_kept_parts();
  if (ok) transport_->leave_reads("end of backward");
  for (const auto& unit : units_) {
    unit->reduced_this_backward = false;
    unit->came_early = false;
  }
  if (!ok) {
    prefetcher_.restart_recording();
    reached_.clear();
  } else if (sink_ran_ && !shadowing_ && !prefetcher_.recorded() &&
             prefetcher_.finish_recording()) {
    compare_order_across_ranks();
  }
  first_steady_backward_ = prefetcher_.recorded();
  sink_ran_ = touched_ = false;
  if (ok) {
    throw_misuse();
  } else {
    misuse_.clear();
  }
}

// A rank whose path left one out takes part with zeros.
void ShardedState::average_ignored_gradients() {
  if (groups_.world_size() == 1) return;
  at::NoGradGuard no_grad;
  CollectiveScope scope("all_reduce of ignored parameters", nullptr, 0);
  for (const at::Tensor& parameter : ignored_) {
    if (!parameter.requires_grad()) continue;
    at::Tensor& gradient = parameter.mutable_grad();
    gradient =
        gradient.defined() ? gradient.contiguous() : at::zeros_like(parameter);
    std::vector<at::Tensor> tensors = {gradient};
    groups_.world()->allreduce(tensors)->wait();
    gradient.div_(options_.gradient_divide_factor.value_or(
        static_cast<double>(groups_.world_size())));
  }
}

// Shared memory names the unit in every signal; a c10d backend would exchange
// the bytes of different units without a word.
void ShardedState::compare_order_across_ranks() {
  if (shard_group_->getSize() == 1 || uses_shared_memory(shard_group_)) {
    return;
  }
  const auto options = at::TensorOptions(groups_.device()).dtype(at::kLong);
  at::Tensor own = at::full({1}, prefetcher_.fingerprint(), options);
  at::Tensor all = at::zeros({shard_group_->getSize()}, options);
  shard_group_->_allgather_base(all, own)->wait();
  const at::Tensor host = all.cpu();
  for (int rank = 0; rank < shard_group_->getSize(); ++rank) {
    TORCH_CHECK(
        host.const_data_ptr<int64_t>()[rank] == prefetcher_.fingerprint(),
        "rank ", rank, " and rank ", shard_group_->getRank(),
        " used the units in different orders in the first iteration; "
        "every rank must run the same model");
  }
}

}  // namespace fullshard::internal
