#ifndef FULLSHARD_SHARDING_GRADIENT_REDUCER_H_
#define FULLSHARD_SHARDING_GRADIENT_REDUCER_H_

#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/sharding/shard_options.h"
#include "fullshard/sharding/transport.h"
#include "fullshard/sharding/unit.h"

namespace fullshard::internal {

// By what gradients in half precision are divided before they are summed, so
// that the sum cannot overflow; by divide_factor over this after it. About the
// square root of `divide_factor`. (torch.distributed: default_hooks.)
double predivide_factor(double divide_factor);

// Turns the local gradients of a unit into this rank's gradient shard: the sum
// over all ranks of the shard and replicate groups, divided by their number.
//
// A reduction is finished when a later unit's is started, or by flush(), so
// that a rank does not wait in lock-step for the others.
class GradientReducer {
 public:
  // `replicate_group` may be null: one replica.
  GradientReducer(Transport& transport, int num_shards,
                  c10::intrusive_ptr<c10d::Backend> replicate_group,
                  const ShardOptions& options);

  // Starts the reduction of `gradients`, one per input of the unit's sink, some
  // undefined. Empty: this rank used none of the unit's parameters.
  //
  // Collective: all ranks of both groups, in the same order of units.
  void reduce(Unit& unit, const std::vector<at::Tensor>& gradients);

  // Adds `gradients` to what reduce() will send later, without communication.
  void keep(Unit& unit, const std::vector<at::Tensor>& gradients);

  // Finishes the reductions that are under way.
  void flush();

  // Off: gradient shards are kept back, summed, until a reduction with it on
  // sends them through the all-reduce over the replicas.
  void set_all_reduce(bool value) { all_reduce_ = value; }

  // Calls `on_reduced` whenever the gradient shards of a unit are complete.
  void set_on_reduced(std::function<void(Unit& unit)> on_reduced) {
    on_reduced_ = std::move(on_reduced);
  }

 private:
  struct Pending {
    Unit* unit;
    std::vector<at::Tensor> gradients;  // Keeps alive what `own` points to.
    std::vector<std::vector<FlatParameter::Piece>> own;  // By flat parameter.
  };

  bool has_replicas() const;
  double predivide(const Unit& unit) const;
  void make_room();
  void finish_oldest();
  void reduce_by_hook(Unit& unit, const std::vector<at::Tensor>& gradients);
  // Takes the sum over the shard group to the gradient shard, through the
  // replicas.
  void add_to_gradient(Unit& unit, size_t flat, at::Tensor sum);
  void write(Unit& unit, const std::vector<at::Tensor>& gradients, char* buffer,
             bool accumulate,
             std::vector<std::vector<FlatParameter::Piece>>* own) const;
  void finish_with_replicas(Pending& pending);
  void note_reduced(Unit& unit) const;
  static void add_to_shard(FlatParameter& flat, const at::Tensor& sum,
                           double scale);

  Transport& transport_;
  const double scale_;
  const c10::intrusive_ptr<c10d::Backend> replicate_group_;
  const ShardOptions options_;
  bool all_reduce_ = true;
  std::function<void(Unit& unit)> on_reduced_;
  std::deque<Pending> pending_;  // Oldest first.
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_GRADIENT_REDUCER_H_
