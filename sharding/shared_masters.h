#ifndef FULLSHARD_SHARDING_SHARED_MASTERS_H_
#define FULLSHARD_SHARDING_SHARED_MASTERS_H_

#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "fullshard/core/shm_backend.h"
#include "fullshard/sharding/unit.h"

namespace fullshard::internal {

// Master shards in pages that all ranks of the host map.
//
// [Note: Shared master shards]
// Where a unit computes in the dtype it is stored in, the master shards of all
// ranks, side by side, are the unsharded unit. A gather then moves no byte and
// takes no memory; it must only be sure that nobody writes. So time is cut into
// read phases. A rank enters with its first gather, which says that its shards
// are final, and waits until all have entered before it reads; it leaves at the
// end of backward, of a forward without gradients, or before an optimizer of
// ours writes, and waits until all have left. Between two phases every rank may
// write its own shards.
//
// Tensors that a user gets may be written at any time. Their flat parameter
// takes its master back to memory of its own (FlatParameter::own_master), and
// enter() copies it; some of torch's optimizers raise no version counter.
class SharedMasters {
 public:
  // Moves the master shards of those units for which it is possible.
  // Collective.
  SharedMasters(ShmBackend& group,
                const std::vector<std::unique_ptr<Unit>>& units);

  // Returns the unsharded unit, or null if its masters are not shared.
  // Of all ranks together.
  int64_t num_bytes() const { return static_cast<int64_t>(memory_.nbytes()); }
  char* memory(const Unit& unit) const {
    return places_[static_cast<size_t>(unit.index)];
  }

  // Opens a read phase if none is open. Does not wait.
  void enter();
  // The same before a gather of `unit`.
  // Errors: c10::Error if its own shard changed while the phase was open.
  void read(const Unit& unit);
  // Returns when the shards of all ranks can be read.
  void wait_until_all_entered();
  // Ends the read phase; opens it first if none is open, so that a rank that
  // read nothing takes part. Collective.
  void leave(const char* what);
  bool reading() const { return reading_; }

 private:
  enum Signal { kEntered = 0, kLeft = 1, kNumSignals = 2 };

  at::Tensor memory_;
  std::vector<char*> places_;  // By unit index.
  std::vector<c10::intrusive_ptr<FlatParameter>> flats_;
  std::unique_ptr<ShmSignals> signals_;
  uint32_t phase_ = 0;
  bool reading_ = false;
  bool all_entered_ = false;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_SHARED_MASTERS_H_
