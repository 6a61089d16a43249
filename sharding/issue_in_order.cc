// The collectives of a backward in one order on all ranks; [Note: Ranks on
// different paths].

#include <algorithm>

#include "ATen/ops/zeros.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard::internal {
namespace {

void add_once(const Issue& issue, std::vector<Issue>& issues) {
  if (std::find(issues.begin(), issues.end(), issue) == issues.end()) {
    issues.push_back(issue);
  }
}

}  // namespace

void ShardedState::start_order_anew() {
  std::vector<Issue> reductions;
  for (size_t i = units_.size(); i-- > 0;) {
    if (units_[i]->trainable()) {
      reductions.push_back({units_[i]->index, /*reduces=*/true});
    }
  }
  order_.set(BackwardOrder::Stage::kModules, std::move(reductions));
  issued_.clear();
}

void ShardedState::record_order_anew() {
  prefetcher_ = Prefetcher();
  first_steady_backward_ = false;
  if (!order_.complete()) return;
  std::vector<Issue> reductions;
  for (const Issue& issue : order_.issues()) {
    if (issue.reduces) reductions.push_back(issue);
  }
  order_.set(BackwardOrder::Stage::kReductions, std::move(reductions));
}

void ShardedState::note_use(Unit& unit) {
  if (prefetcher_.phase() != Prefetcher::kForward) return;
  if (forward_is_new_ && !in_training_forward_ && at::GradMode::is_enabled()) {
    begin_uses();
  }
  unit.used_in_forward = true;
}

void ShardedState::begin_uses() {
  for (const auto& unit : units_) unit->used_in_forward = false;
  forward_is_new_ = false;
}

// This rank's gradient of a unit that comes before `place` is still to come.
bool ShardedState::reduction_is_due_before(std::ptrdiff_t place) const {
  if (!gradient_sync_) return false;
  const auto begin =
      order_.issues().begin() + static_cast<std::ptrdiff_t>(order_.cursor());
  return std::any_of(
      begin, order_.issues().begin() + place, [this](const Issue& issue) {
        const Unit& unit = *units_[static_cast<size_t>(issue.unit)];
        return issue.reduces && unit.used_in_forward && !unit.came_early &&
               !unit.reduced_this_backward;
      });
}

void ShardedState::issue_gather(Unit& unit) {
  if (unit.state == UnitState::kGathering) return;
  if (unit.state == UnitState::kUnsharded) {
    // Units that are kept by request are on every rank.
    if (unit.pinned || !reshard_after_backward_) return;
    if (unit.has_views()) return transport_->contribute(unit);
    reshard(unit);
  }
  if (unit.used_in_forward) {
    start_gather(unit);  // Needed soon.
  } else {
    take_part_in({unit.index}, {});
  }
}

void ShardedState::issue(const Issue& issue) {
  Unit& unit = *units_[static_cast<size_t>(issue.unit)];
  if (!issue.reduces) return issue_gather(unit);
  unit.came_early = false;
  if (gradient_sync_ && !unit.reduced_this_backward) reduce(unit, {});
}

void ShardedState::gather_in_order(Unit& unit) {
  const std::ptrdiff_t place = order_.find({unit.index, /*reduces=*/false});
  if (place < 0 || reduction_is_due_before(place)) return;
  while (static_cast<std::ptrdiff_t>(order_.cursor()) < place) {
    issue(order_.take());
  }
  order_.take();
}

void ShardedState::reduce(Unit& unit,
                          const std::vector<at::Tensor>& gradients) {
  issued_.push_back({unit.index, /*reduces=*/true});
  reducer_->reduce(unit, gradients);
}

void ShardedState::reduce_in_order(Unit& unit,
                                   const std::vector<at::Tensor>& gradients) {
  if (groups_.world_size() == 1) {  // Nobody waits.
    reducer_->reduce(unit, gradients);
    return;
  }
  const Issue own{unit.index, /*reduces=*/true};
  if (order_.stage() == BackwardOrder::Stage::kModules) {
    reached_.push_back(own);
  }
  const std::ptrdiff_t place = order_.find(own);
  if (place < 0 || reduction_is_due_before(place)) {
    reducer_->keep(unit, gradients);
    unit.came_early = true;
    return;
  }
  while (static_cast<std::ptrdiff_t>(order_.cursor()) < place) {
    issue(order_.take());
  }
  order_.take();
  reduce(unit, gradients);
  const auto early_is_next = [this] {
    const Issue* next = order_.next();
    return next != nullptr && next->reduces &&
           units_[static_cast<size_t>(next->unit)]->came_early;
  };
  while (early_is_next()) issue(order_.take());
}

void ShardedState::finish_order() {
  if (groups_.world_size() == 1) {
    // Gradients kept under no_sync are due.
    for (const auto& unit : units_) {
      if (sink_ran_ && gradient_sync_ && unit->unreduced_gradients.defined()) {
        reducer_->reduce(*unit, {});
      }
    }
    return;
  }
  if (!order_.complete()) take_part_in_rest();
  while (order_.next() != nullptr) {
    const Issue next = order_.take();
    if (!next.reduces || sink_ran_) issue(next);
  }
  // Whose turn was over when they came.
  for (const auto& unit : units_) {
    if (sink_ran_ && gradient_sync_ && unit->came_early) {
      issue({unit->index, /*reduces=*/true});
    }
  }
}

// Rank 0's order becomes that of all. Collective, after a backward that ended
// well on every rank.
void ShardedState::adopt_order() {
  using Stage = BackwardOrder::Stage;
  if (groups_.world_size() == 1) return;
  std::vector<Issue> own;
  Stage next = Stage::kReductions;
  if (order_.stage() == Stage::kModules) {
    own = reached_;
  } else if (order_.stage() == Stage::kReductions && first_steady_backward_ &&
             gathers_communicate_) {
    own = issued_;
    next = Stage::kComplete;
  } else {
    return;
  }
  for (const Issue& reduction : order_.issues()) add_once(reduction, own);
  CollectiveScope scope("broadcast of the order of a backward", nullptr, 0);
  const auto broadcast = [&](at::Tensor values) {
    std::vector<at::Tensor> tensors = {values.to(groups_.device())};
    groups_.world()->broadcast(tensors)->wait();
    return tensors[0].cpu();
  };
  const auto size =
      broadcast(
          at::zeros({1}, at::kLong).fill_(static_cast<int64_t>(own.size())))
          .item<int64_t>();
  at::Tensor codes = at::zeros({size}, at::kLong);
  for (int64_t i = 0; groups_.rank() == 0 && i < size; ++i) {
    const Issue& issue = own[static_cast<size_t>(i)];
    codes.data_ptr<int64_t>()[i] = 2 * issue.unit + (issue.reduces ? 1 : 0);
  }
  codes = broadcast(codes);
  std::vector<Issue> adopted;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t code = codes.const_data_ptr<int64_t>()[i];
    adopted.push_back({static_cast<int>(code / 2), code % 2 == 1});
  }
  order_.set(next, std::move(adopted));
  reached_.clear();
}

}  // namespace fullshard::internal
