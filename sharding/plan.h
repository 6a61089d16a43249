#ifndef FULLSHARD_SHARDING_PLAN_H_
#define FULLSHARD_SHARDING_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "c10/core/ScalarType.h"
#include "fullshard/sharding/shard_options.h"

namespace fullshard {

// A model as a plan sees it: names and shapes, no tensors.
struct PlanParameter {
  std::string name;
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;  // In which it is stored.
  bool trainable = true;
  // In which it is gathered. Default: as PlanOptions::param_dtype says.
  std::optional<at::ScalarType> compute_dtype = std::nullopt;
};
struct PlanUnit {
  std::string name;
  std::vector<PlanParameter> parameters;
  bool encloses_others = false;  // As the root: stays unsharded in forward.
  // Where the unit has options of its own; see UnitOptions.
  std::optional<bool> reshard_after_forward = std::nullopt;
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

struct PlanOptions {
  int num_shards = 1;    // N, the ranks of a shard group.
  int num_replicas = 1;  // Shard groups.
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  std::optional<at::ScalarType> param_dtype;   // As in MixedPrecision.
  std::optional<at::ScalarType> reduce_dtype;  // Default: param_dtype.
  bool keep_low_precision_grads = false;
  int optimizer_states = 2;  // Tensors per parameter; AdamW has 2.
};

// What sharding costs, before it is done. Bytes are those of one rank, without
// activations and without what LibTorch needs for itself. Memory that the ranks
// of a host share is counted as if each had its own.
struct Plan {
  struct Row {
    std::string unit;
    int64_t num_parameters = 0;
    int64_t numel = 0;
    int64_t padding_numel = 0;
    int64_t unsharded_bytes = 0;  // In the compute dtype.
    int64_t sharded_bytes = 0;    // Master shards.
    int64_t gradient_bytes = 0;   // Gradient shards.
    int64_t reduce_bytes = 0;     // Unsharded gradients, in the reduce dtype.
    int64_t storage_bytes = 0;    // Unsharded, in the storage dtype.
    int64_t trainable_bytes = 0;  // Of sharded_bytes.
    // While the unit's gradients are reduced: those that autograd hands over,
    // and a reduced shard in the reduce dtype.
    int64_t autograd_bytes = 0;
    // Per step, with one forward and one backward.
    int gathers_forward = 0;
    int gathers_backward = 0;
    int reduce_scatters = 0;
    int all_reduces = 0;
  };

  int num_shards = 1;
  int num_replicas = 1;
  std::vector<Row> rows;  // In module order.
  Row total;              // Sums.

  // With S: master shards, G: gradient shards, U (in the storage dtype: V, as
  // gradients: R, as autograd_bytes: A): the largest unit that is resharded
  // after forward, X: those that stay or enclose others, O: the optimizer's
  // state. Backward's is what sharding allocates, peak what the rank has when
  // autograd's own gradients are there too; see docs/planning.md.
  int64_t init_bytes = 0;      // S + V
  int64_t forward_bytes = 0;   // S + 2U + X
  int64_t backward_bytes = 0;  // S + G + 2U + 2R + X
  int64_t step_bytes = 0;      // S + G + O, after the optimizer
  int64_t peak_bytes = 0;      // S + G + 2U + 2R + X + A + O
  // Bytes that this rank receives and sends by gathers and reductions.
  int64_t traffic_bytes = 0;

  // For people: one line per unit, alike ones that follow each other in one.
  std::string table() const;
};

// Pure arithmetic; 70B parameters over 16,384 ranks take less than a
// millisecond.
//
// Requires: num_shards and num_replicas are at least 1.
Plan make_plan(const std::vector<PlanUnit>& units, const PlanOptions& options);

// "1.5 GiB".
std::string bytes_for_people(int64_t num_bytes);

}  // namespace fullshard

#endif  // FULLSHARD_SHARDING_PLAN_H_
