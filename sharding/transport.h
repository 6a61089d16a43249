#ifndef FULLSHARD_SHARDING_TRANSPORT_H_
#define FULLSHARD_SHARDING_TRANSPORT_H_

#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/sharding/unit.h"

namespace fullshard::internal {

// Moves a unit's bytes between the ranks of the shard group, and owns the
// memory they are gathered into (the slot pool) and reduced from.
//
// The order of calls for one unit is start_gather, finish_gather, release; and
// acquire_reduce_buffer, (the caller writes its gradients), start_reduce,
// finish_reduce, which finishes the oldest reduction that was started. At most
// max_unfinished_reductions() are unfinished when the next buffer is acquired.
//
// Collective: all of them, by all ranks of the shard group, in the same order.
// Errors: c10::Error naming the unit and the ranks if a peer is late, gone or
// at another unit.
class Transport {
 public:
  virtual ~Transport() = default;

  // Gives `unit` memory of slot_bytes() and puts this rank's slice there.
  virtual void start_gather(Unit& unit) = 0;
  // Returns when the slices of all ranks are in place.
  virtual void finish_gather(Unit& unit) = 0;
  // This rank no longer reads the unit's memory. With `until_backward` and a
  // reshard group it keeps its part of that group's copy, from which the next
  // gather takes the values if they have not changed.
  virtual void release(Unit& unit, bool until_backward) = 0;
  void release(Unit& unit) { release(unit, /*until_backward=*/false); }

  // Takes part in a gather of a unit whose values this rank has and keeps.
  virtual void contribute(Unit& unit) = 0;

  // Whether to gather the unit moves nothing.
  virtual bool shares_masters(const Unit& /*unit*/) const { return false; }
  // Read phases; see [Note: Shared master shards]. Without shared masters
  // there are none.
  virtual bool reading() const { return false; }
  virtual void enter_reads() {}
  // All units are released, or their values are about to be replaced. `what`
  // names the place in the messages of a time-out.
  virtual void leave_reads(const char* /*what*/) {}

  // A backward has ended: what was kept for it can go.
  virtual void forget_kept_parts() {}

  virtual int max_unfinished_reductions() const { return 1; }
  // Whether finish_reduce would return without waiting for a peer.
  virtual bool reduction_is_ready() const { return false; }
  // Returns memory of reduce_bytes(), to be filled with local gradients.
  virtual char* acquire_reduce_buffer(Unit& unit) = 0;
  // `used`: this rank's backward reached the unit.
  virtual void start_reduce(Unit& unit, bool used) = 0;
  // One of the shards that a reduction fills.
  struct Reduced {
    size_t flat = 0;          // Into unit.flats.
    at::Tensor shard;         // [chunk]
    double scale = 1;         // Multiplies the sum over ranks.
    bool accumulate = false;  // Adds to what is there.
    // Where this rank's own gradients of the chunk lie; empty: in the buffer.
    std::vector<FlatParameter::Piece> own = {};
  };
  // Whether sums are taken in float, whatever the reduce dtype.
  virtual bool sums_in_float() const { return false; }
  // Whether finish_reduce takes Reduced::own into account.
  virtual bool reads_own_gradients() const { return false; }
  // Returns false, and leaves the shards alone, if no rank used the unit and
  // the ranks can tell.
  virtual bool finish_reduce(Unit& unit,
                             const std::vector<Reduced>& outputs) = 0;

  // What this rank has allocated, in bytes. Memory that the ranks of a host
  // share is counted once per host, on rank 0.
  struct Memory {
    int64_t slots = 0;           // For unsharded units.
    int64_t reduce_buffers = 0;  // For unsharded gradients.
    int64_t shared_masters = 0;  // Master shards of all ranks.
  };
  virtual Memory memory() const = 0;
};

// Works over any c10d backend, with slots of this rank's own.
std::unique_ptr<Transport> make_collective_transport(
    const ProcessGroups& groups, c10::intrusive_ptr<c10d::Backend> shard_group,
    const std::vector<std::unique_ptr<Unit>>& units);

// Works over pages that all ranks of the host map: a gather is "write your
// slice, tell the others", and the unsharded unit exists once per host.
std::unique_ptr<Transport> make_shared_memory_transport(
    ShmBackend& shard_group, const std::vector<std::unique_ptr<Unit>>& units);

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_TRANSPORT_H_
