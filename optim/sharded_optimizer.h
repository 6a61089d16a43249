#ifndef FULLSHARD_OPTIM_SHARDED_OPTIMIZER_H_
#define FULLSHARD_OPTIM_SHARDED_OPTIMIZER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "fullshard/optim/param_groups.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/sharding/sharded_state_observer.h"

namespace fullshard::internal {
class FlatParameter;
}  // namespace fullshard::internal

namespace fullshard {

// A value of torch.optim's param_groups: None, bool, float or a tuple.
using OptimizerOption =
    std::variant<std::monostate, bool, double, std::pair<double, double>>;
using OptimizerOptions = std::vector<std::pair<std::string, OptimizerOption>>;

// The parameters that are updated with one rate and one decay.
struct OptimizerGroup {
  std::string name;  // The ParamGroup's, or "default"; those that do not decay
                     // have "/no_decay" after it.
  double lr = 0;
  double lr_scale = 1;
  double weight_decay = 0;
  std::vector<std::string> parameters;  // In module order.
};

// This rank's optimizer state of one parameter.
struct LocalOptimizerState {
  std::string name;  // As in the original module.
  std::vector<int64_t> original_sizes;
  // This rank's elements, in memory order: [offset, offset + numel) of the
  // parameter. numel is 0 where the rank owns none of it.
  int64_t parameter_offset = 0;
  int64_t numel = 0;
  // Updates so far; 0 if the parameter never had a gradient.
  int64_t step = 0;
  // [numel] each, under torch.optim's names; views of the optimizer's memory.
  std::vector<std::pair<std::string, at::Tensor>> tensors;
};

// What the optimizers of this library share: they update this rank's flat
// master shards, a list of runs at a time, through LibTorch's fused kernels.
// Clipping by ShardedModule::clip_grad_norm is folded into the same pass over
// memory.
//
// All parameters of a flat parameter have a gradient if one of them has: those
// that backward did not reach are updated with zeros, as with FSDP's flat
// parameters. Units that backward did not reach are left alone.
//
// No communication. Keeps the sharded module's state alive.
//
// Follows ShardedModule::set_trainable: a parameter that becomes trainable
// joins the first group that it matches, at step 0.
class ShardedOptimizer : private internal::ShardedStateObserver {
 public:
  ~ShardedOptimizer() override;
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  // Updates every parameter that has a gradient. Before that no unit is
  // unsharded any more, so that a copy of the old values cannot be used. This
  // and every other change of parameters or state first waits for a copy that
  // TrainingCheckpoints makes in the background.
  //
  // Collective: all ranks, though nothing is exchanged.
  void step();
  // As ShardedModule::zero_grad.
  void zero_grad(bool set_to_none = false);
  // On: a unit is updated as soon as backward has reduced its gradient, which
  // is freed then, so that a rank holds the gradients of about one unit. step()
  // has nothing left to do. Excludes clipping, and a second backward through a
  // graph whose parameters were updated is wrong. Set the rate before backward.
  void set_step_in_backward(bool value);

  double lr() const { return lr_; }
  // Sets every group's rate to `lr` times its lr_scale.
  void set_lr(double lr);
  // Sets the rate of one group, by its place in groups(), until the next
  // set_lr(lr).
  void set_group_lr(size_t group, double lr);
  const std::vector<OptimizerGroup>& groups() const { return groups_; }

  // --- state by name; see also optim/optimizer_state.h
  // One entry for each trainable parameter, in module order, the same names on
  // every rank. Writing to the tensors changes the optimizer.
  std::vector<LocalOptimizerState> local_state() const;
  // Copies state that has the names and ranges of local_state(), in any order.
  // A parameter at step 0 starts afresh; its tensors may be left out.
  //
  // Errors: kNotFound or kInvalidArgument naming the parameter; then nothing
  // has changed.
  absl::Status load_local_state(const std::vector<LocalOptimizerState>& state);

  // Names of the state tensors, as torch.optim has them.
  const std::vector<std::string>& state_names() const { return state_names_; }
  // The state tensor of that place in state_names(), split as `flat` is.
  const at::Tensor& state_shard(const internal::FlatParameter& flat,
                                size_t state_name) const;
  // Whether torch.optim keeps the step, and state before the first one.
  virtual bool has_step() const { return true; }
  virtual bool has_state_at_step_0() const { return false; }
  // What torch.optim's param_groups hold next to lr, weight_decay and params.
  virtual OptimizerOptions hyperparameters() const = 0;

  const std::shared_ptr<internal::ShardedState>& sharded_state() const {
    return state_;
  }

 protected:
  struct StateTensor {
    std::string name;
    double initial_value = 0;
  };
  struct Config {
    double lr = 0;
    double weight_decay = 0;
    DecayPredicate decays;
    std::vector<ParamGroup> groups;
    std::vector<StateTensor> state;
  };
  // Errors: c10::Error for a rate or decay that is negative or not a number,
  // and for a group that matches no parameter.
  ShardedOptimizer(const ShardedModule& sharded, Config config);

  // Runs of one group and dtype, each with a gradient.
  struct Batch {
    const OptimizerGroup* group = nullptr;
    bool first_update = false;  // No run has been updated before.
    std::vector<at::Tensor> parameters, gradients;
    std::vector<at::Tensor> steps;               // 0-dim float, this one's.
    std::vector<std::vector<at::Tensor>> state;  // As in Config::state.
  };
  // Updates the runs in place; gradients count divided by `grad_scale`.
  virtual void update(Batch& batch,
                      const std::optional<at::Tensor>& grad_scale) = 0;

 private:
  // Counts the updates of some parameters of one flat parameter; all of them,
  // unless state was loaded in which they differ.
  struct Clock {
    int64_t updates = 0;
    at::Tensor step;  // The same as a 0-dim float.
  };
  struct Run {
    int64_t begin = 0, end = 0;  // In the shard.
    at::Tensor parameter, gradient;
    std::vector<at::Tensor> state;
    size_t group = 0;
    size_t clock = 0;
  };
  struct FlatState {
    internal::FlatParameter* flat = nullptr;
    std::vector<size_t> group_of;   // By parameter.
    std::vector<at::Tensor> state;  // [chunk] each.
    std::vector<Clock> clocks;
    std::vector<size_t> clock_of;  // By parameter.
    std::vector<Run> runs;
    at::Tensor gradient;  // The runs' gradients are views of this one.
  };
  using Batches = std::map<std::tuple<size_t, at::ScalarType, bool>, Batch>;

  struct MovedState {
    int64_t step = 0;
    std::vector<at::Tensor> tensors;  // In full.
  };

  void before_layout_change(const internal::Unit& unit) override;
  void after_layout_change(const internal::Unit& unit) override;
  void before_gradients_are_freed() override;
  FlatState make_state(internal::FlatParameter& flat) const;
  void make_groups();
  void check_groups() const;
  void make_runs(FlatState& flat_state) const;
  static void set_gradients(FlatState& flat_state);
  static void drop_gradients(FlatState& flat_state);
  void collect(FlatState& flat_state, Batches& batches);
  void update_all(Batches& batches,
                  const std::optional<at::Tensor>& grad_scale);
  void update_unit(const internal::Unit& unit);
  void set_steps(FlatState& flat_state, const std::vector<int64_t>& steps);
  std::optional<at::Tensor> take_grad_scale();
  LocalOptimizerState local_state(const FlatState& flat_state,
                                  size_t parameter) const;

  const std::shared_ptr<internal::ShardedState> state_;
  const Config config_;
  double lr_;
  std::vector<std::string> state_names_;
  std::vector<double> initial_values_;
  std::vector<OptimizerGroup> groups_;
  std::vector<FlatState> flats_;  // In module order.
  // By parameter, while its unit is laid out anew.
  std::map<std::string, MovedState> moving_;
};

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_SHARDED_OPTIMIZER_H_
