#ifndef FULLSHARD_OPTIM_EMA_H_
#define FULLSHARD_OPTIM_EMA_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/sharding/sharded_state_observer.h"

namespace fullshard::internal {
class FlatParameter;
}  // namespace fullshard::internal

namespace fullshard {

// An exponential moving average of the trainable parameters, of which each rank
// keeps its own part in the master dtype, or in float where that is shorter.
//
// One update does ema += (1 - d) (parameter - ema) with d = 2^(-1/half_life):
// what a parameter was has lost half its weight after half_life updates. The
// average starts with the values at construction. Frozen parameters and buffers
// have none.
//
// Keeps the sharded module's state alive.
//
// Follows ShardedModule::set_trainable: the average of a parameter that becomes
// trainable starts with its value then.
class ShardedEma final : private internal::ShardedStateObserver {
 public:
  // Errors: c10::Error for a half-life that is not above 0.
  ShardedEma(const ShardedModule& sharded, double half_life_steps);
  ~ShardedEma() override;
  ShardedEma(const ShardedEma&) = delete;
  ShardedEma& operator=(const ShardedEma&) = delete;

  // Call after the optimizer's step. No communication. Waits for a copy that
  // TrainingCheckpoints makes in the background.
  // Requires: !swapped_in().
  void update();
  double decay() const { return decay_; }
  const std::shared_ptr<internal::ShardedState>& sharded_state() const {
    return state_;
  }

  // Puts the average into the model, for evaluation or to save it with
  // full_state_dict(), and keeps the parameters aside; swap_out() puts them
  // back, bit for bit.
  //
  // Collective: all ranks, though nothing is exchanged.
  // Errors: c10::Error if it is swapped in (out) already, and from swap_out()
  // if the model was trained in between, whose result is then kept.
  void swap_in();
  void swap_out();
  bool swapped_in() const { return !kept_.empty(); }

  // Swapped in for as long as it lives.
  class Scope {
   public:
    explicit Scope(ShardedEma& ema);
    ~Scope() noexcept(false);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    ShardedEma& ema_;
    const int exceptions_;
  };

  // --- state by name, as ShardedModule has for the parameters
  // This rank's part of every average, in module order: [numel] each, views, in
  // the parameter's order in memory. See ShardedModule::local_shards.
  // Requires: !swapped_in().
  std::vector<std::pair<std::string, at::Tensor>> local_averages() const;
  // Gathers unit by unit and calls `sink` with the average of every trainable
  // parameter, under each of its names and in its original shape, on rank 0 or
  // on every rank.
  //
  // Collective. Requires: !swapped_in(). Errors: as
  // ShardedModule::full_state_dict.
  absl::Status full_state_dict(const TensorSink& sink,
                               bool all_ranks = false) const;
  // Copies this rank's part of every average.
  //
  // No communication. Requires: !swapped_in(). Errors: as
  // ShardedModule::load_full_state_dict.
  absl::Status load_full_state_dict(const TensorSource& source);

 private:
  void before_layout_change(const internal::Unit& unit) override;
  void after_layout_change(const internal::Unit& unit) override;
  at::Tensor start_average(const internal::FlatParameter& flat) const;

  const std::shared_ptr<internal::ShardedState> state_;
  const double decay_;
  // [chunk], one per trainable flat parameter.
  std::map<const internal::FlatParameter*, at::Tensor> averages_;
  // By parameter, in full, while its unit is laid out anew.
  std::map<std::string, at::Tensor> moving_;
  // While swapped in: the parameters, and the generations of the averages.
  std::vector<at::Tensor> kept_;
  std::vector<uint64_t> generations_;
};

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_EMA_H_
