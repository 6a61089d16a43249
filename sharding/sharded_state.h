#ifndef FULLSHARD_SHARDING_SHARDED_STATE_H_
#define FULLSHARD_SHARDING_SHARDED_STATE_H_

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "c10/util/ArrayRef.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/core/saved_tensor_hooks.h"
#include "fullshard/sharding/backward_order.h"
#include "fullshard/sharding/gradient_reducer.h"
#include "fullshard/sharding/prefetcher.h"
#include "fullshard/sharding/shard_options.h"
#include "fullshard/sharding/sharded_state_observer.h"
#include "fullshard/sharding/transport.h"
#include "fullshard/sharding/unit.h"

namespace fullshard::internal {

// The units of one sharded model and their state machine. A step reads:
//   touch -> unshard -> start_gather, finish_gather -> reshard;
//   backward -> touch -> on_gradients -> reduce -> reshard;
//   after_backward -> flush, reshard all.
// One lock guards it: on CUDA, backward runs on device threads.
class ShardedState final : public BackwardObserver,
                           public std::enable_shared_from_this<ShardedState> {
 public:
  // `units` as split_into_units() made them. Collective: creates slots.
  // `ignored`: parameters that are not sharded.
  static std::shared_ptr<ShardedState> create(
      ProcessGroups groups, const ShardOptions& options,
      std::vector<std::unique_ptr<Unit>> units,
      std::vector<at::Tensor> ignored = {});
  ~ShardedState();

  // Unshards `set` as one, reshards what neither `set` nor a view needs, and
  // starts the next gather.
  void touch(c10::ArrayRef<Unit*> set);

  // Reshards every unit. Views that are alive throw when used later.
  void reshard_all();
  // The same for one unit; nothing if it is sharded. `until_backward`: see
  // Transport::release.
  void reshard(Unit& unit, bool until_backward = false);
  // Starts to gather `unit`, and finish_unshard() ends it; it then stays until
  // the end of backward, of a forward without gradients, or a reshard.
  void start_unshard(Unit& unit);
  void finish_unshard(Unit& unit);
  // What is unsharded now stays so: sees to it that changed values are noticed.
  void keep_present();
  // Off: units stay unsharded after backward, until the values change.
  void set_reshard_after_backward(bool value) {
    reshard_after_backward_ = value;
  }
  // Forgets the recorded order of gathers. Collective.
  void record_order_anew();
  // Whenever `unit` is gathered in `phase`, starts the gathers of `next` too.
  void set_prefetch(Unit& unit, Prefetcher::Phase phase,
                    std::vector<Unit*> next) {
    unit.prefetch[phase] = std::move(next);
  }
  // Makes these parameters trainable, or freezes them, and lays out anew the
  // units that they belong to. Collective.
  // Errors: kInvalidArgument or kFailedPrecondition naming the parameter or the
  // unit; then nothing has changed.
  absl::Status set_trainable(
      const std::function<bool(const std::string& name)>& which, bool value);
  // From now on gathers in the storage dtype, or as the policy says again.
  // Collective.
  void set_full_precision(bool value);
  bool full_precision() const { return full_precision_; }
  // It lives until remove_observer(). Not while a backward runs.
  void add_observer(ShardedStateObserver* observer);
  void remove_observer(ShardedStateObserver* observer);
  // Call before writing to master shards. Returns when no rank reads them any
  // more. Collective.
  void begin_update();
  // Tells the observers that this rank's master shards, or what is kept for
  // them, will change. Not collective; enough where no rank reads them.
  void notify_before_update();

  // A forward of the root: checks for misuse and stale copies, and follows the
  // recorded order from its start. Errors: c10::Error naming the parameter.
  void begin_forward();
  void end_forward();
  // An exception left the forward. The next one cleans up: what it needs may
  // come from the peer that failed.
  void forward_failed() noexcept;

  // [Note: Uneven inputs]
  // While joining, a rank that opens a forward with gradients first tells the
  // others that it is at work, and how it will reduce; a rank that has run out
  // of batches learns by that whether to do one more step beside them. In such
  // a step it issues every collective in order, with gradients of zero.
  void set_joining(bool value) { joining_ = value; }
  // Returns false, on every rank, once none is at work any more. Else takes
  // part in one forward and backward; `reduced` tells if that gave gradients.
  // Collective. Errors: c10::Error where gathers communicate and fewer than two
  // steps were run, so that their order is not known.
  bool shadow_step(bool* reduced);

  // --- gradients
  void on_gradients(Unit& unit, std::vector<at::Tensor>&& gradients);
  void set_requires_gradient_sync(bool value) { gradient_sync_ = value; }
  bool requires_gradient_sync() const { return gradient_sync_; }
  void set_requires_all_reduce(bool value) {
    all_reduce_ = value;
    reducer_->set_all_reduce(value);
  }
  const std::vector<at::Tensor>& ignored_parameters() const { return ignored_; }
  void zero_grad(bool set_to_none);
  // [Note: Clipping folded into the optimizer]
  // With an optimizer of ours attached, clipping sets this factor, which the
  // optimizer's own pass applies; otherwise clipping scales the shards.
  double pending_gradient_scale = 1;
  bool optimizer_applies_scale = false;
  void apply_pending_scale();
  // [Note: Optimizer in backward]
  // When a unit's reduction has ended, every rank's backward is past its last
  // use of the unit's values: autograd calls a sink after all operators that
  // use its parameters. So its shards may be written then, also where they are
  // the pages that other ranks read. Null: the optimizer steps after backward.
  void set_on_reduced(std::function<void(Unit& unit)> on_reduced) {
    on_reduced_ = std::move(on_reduced);
    reducer_->set_on_reduced(on_reduced_);
  }
  bool steps_in_backward() const { return on_reduced_ != nullptr; }

  // --- BackwardObserver
  void before_backward(const std::vector<torch::autograd::Edge>& outputs,
                       bool create_graph, bool accumulate_grad) override;
  void after_backward(bool ok) override;

  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  const ProcessGroups& groups() const { return groups_; }
  const ShardOptions& options() const { return options_; }
  // Over which gradients and parameters are split; size 1 for no_shard.
  const c10::intrusive_ptr<c10d::Backend>& shard_group() const {
    return shard_group_;
  }
  const Prefetcher& prefetcher() const { return prefetcher_; }
  const Transport& transport() const { return *transport_; }

 private:
  ShardedState(ProcessGroups groups, const ShardOptions& options,
               std::vector<std::unique_ptr<Unit>> units,
               std::vector<at::Tensor> ignored);
  struct Work {
    bool any_at_work = false, gradient_sync = false, all_reduce = false;
  };
  Work announce(bool at_work);
  void attach_sinks(Unit& unit);
  void make_transport();
  void start_gather(Unit& unit);
  void finish_gather(Unit& unit);
  void reshard_others(c10::ArrayRef<Unit*> set);
  // [Note: Ranks on different paths]
  // Collectives are issued in one order on all ranks. In forward these are
  // gathers, as the first iteration had them; a rank whose path skips a unit
  // takes part in its gather and lets it go. In backward the order of
  // reductions is at first that of the modules backwards, after the first
  // backward the one in which rank 0's reached the units. Where gathers
  // communicate, the first backward that prefetches fixes the order of both. A
  // rank whose forward did not use a unit sends zeros at its turn; one that
  // reaches a unit too early keeps its gradient until then.
  void take_part_in(const std::vector<int>& skipped, c10::ArrayRef<Unit*> set);
  void take_part_in_rest();
  void reduce(Unit& unit, const std::vector<at::Tensor>& gradients);
  void reduce_in_order(Unit& unit, const std::vector<at::Tensor>& gradients);
  void gather_in_order(Unit& unit);
  bool reduction_is_due_before(std::ptrdiff_t place) const;
  void issue(const Issue& issue);
  void issue_gather(Unit& unit);
  void finish_order();
  void adopt_order();
  void start_order_anew();
  // Remembers which units this rank's forward used.
  void note_use(Unit& unit);
  void begin_uses();
  void prefetch_next(c10::ArrayRef<Unit*> set);
  void average_ignored_gradients();
  void note_misuse(Unit& unit);
  void throw_misuse();
  void compare_order_across_ranks();
  bool nothing_to_do(c10::ArrayRef<Unit*> set) const;
  bool is_stale(const Unit& unit) const;
  void stop_watching(Unit& unit);

  const ProcessGroups groups_;
  const ShardOptions options_;
  c10::intrusive_ptr<c10d::Backend> shard_group_;
  c10::intrusive_ptr<c10d::Backend> replicate_group_;
  std::vector<std::unique_ptr<Unit>> units_;
  const std::vector<at::Tensor> ignored_;

  std::recursive_mutex mutex_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<GradientReducer> reducer_;
  Prefetcher prefetcher_;
  // See [Note: Ranks on different paths].
  BackwardOrder order_;
  std::vector<Issue> reached_;  // This rank's reductions, until adopted.
  std::vector<Issue> issued_;   // In the backward that is under way.
  bool first_steady_backward_ = false;  // Or a later one: it prefetches.
  bool gathers_communicate_ = false;
  bool forward_is_new_ = true;  // No training forward since the last backward.
  std::vector<Unit*> present_;  // Units that are not kSharded.
  Unit* last_touched_ = nullptr;
  bool gradient_sync_ = true;
  bool all_reduce_ = true;
  bool full_precision_ = false;
  bool joining_ = false;
  bool shadowing_ = false;
  std::function<void(Unit& unit)> on_reduced_;
  bool reshard_after_backward_ = true;
  // A forward scope was opened with gradients on; parts of it, as a frozen
  // tower, may run without.
  bool in_training_forward_ = false;
  bool forward_failed_ = false;
  // In the backward that is under way:
  bool sink_ran_ = false;
  bool touched_ = false;
  std::string misuse_;  // First one seen, until it is thrown.
  std::shared_ptr<void> observing_;
  std::vector<ShardedStateObserver*> observers_;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_SHARDED_STATE_H_
