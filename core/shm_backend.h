#ifndef FULLSHARD_CORE_SHM_BACKEND_H_
#define FULLSHARD_CORE_SHM_BACKEND_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "fullshard/core/shm_peers.h"
#include "fullshard/core/shm_signals.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace fullshard {

// Collectives between the ranks of one host, through shared memory.
//
// Every collective is finished when its call returns; the Work it returns is
// only for the interface. Sums are taken in rank order, in float for half
// types, so results are the same bits on every rank and in every run. Tensors
// are contiguous CPU tensors of float, double, bfloat16, half or (all but AVG
// of it being exact) int64; all-gather and broadcast take any dtype. Sizes may
// be 0. An input may be a slice of its output or the other way round.
//
// Collective: all ranks call the same operations in the same order; a rank that
// calls something else is an error that says who called what.
// Errors: c10::Error naming the rank that is gone (within 50 ms), late (after
// the time-out) or out of step. After an error the group is not usable.
// Thread safety: calls are serialised.
class ShmBackend : public c10d::Backend {
 public:
  // Meets the other ranks and sets up the staging memory, of which pages exist
  // only once used.
  //
  // Errors: as ShmPeers::connect.
  static absl::StatusOr<c10::intrusive_ptr<ShmBackend>> create(
      const ShmGroupOptions& options);

  ~ShmBackend() override;

  // Returns `num_bytes` (uint8) over one region that all ranks map. Zeroed,
  // page aligned, populated on first touch, unmapped with the tensor.
  //
  // Collective.
  at::Tensor allocate_shared(int64_t num_bytes);

  // Returns one such region per rank; element r is meant for rank r to write,
  // and all ranks map all of them.
  //
  // Collective.
  std::vector<at::Tensor> allocate_symmetric(int64_t num_bytes);

  // Collective.
  std::unique_ptr<ShmSignals> make_signals(int num_signals);

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  // Leaves the group: ranks that wait for this one fail at once.
  void abort() override;
  void shutdown() override { abort(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceCoalescedOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& options = {}) override;

 private:
  // What a rank says about the collective that a chunk belongs to; readers
  // compare it with their own.
  struct Call {
    uint64_t sequence;
    int64_t num_bytes;  // per rank
    int16_t operation;  // c10d::OpType
    int16_t dtype;
    int16_t reduction;
    int16_t root;
    bool operator==(const Call& other) const;
  };
  struct Slot;
  enum Signal { kWritten = 0, kReduced = 1, kRead = 2, kNumSignals = 3 };

  ShmBackend(std::shared_ptr<internal::ShmPeers> peers,
             const ShmGroupOptions& options);

  Call begin_call(c10d::OpType operation, const at::Tensor& tensor,
                  int64_t num_bytes, int reduction = 0, int root = 0);
  std::string describe(const Call& call) const;

  // One chunk after the other: every rank takes part in each of them.
  char* start_chunk(uint32_t chunk, const Call& call);
  const char* chunk_of(int rank, uint32_t chunk, const Call& call);
  char* staging(int rank, uint32_t chunk) const;
  Slot& slot(int rank, uint32_t chunk) const;

  void gather(const std::vector<char*>& outputs, const char* input,
              const Call& call);
  void reduce_scatter_slices(void* output,
                             const std::vector<const char*>& inputs,
                             const Call& call);
  void reduce_all(char* data, const Call& call);
  void reduce_all_small(char* data, const Call& call);
  void synchronize_ranks();

  std::shared_ptr<internal::SharedMapping> map_shared(int64_t num_bytes);
  c10::intrusive_ptr<c10d::Work> done(c10d::OpType operation,
                                      std::vector<at::Tensor> results) const;

  std::shared_ptr<internal::ShmPeers> peers_;
  std::unique_ptr<internal::SharedMapping> staging_;
  std::unique_ptr<ShmSignals> signals_;
  std::mutex mutex_;
  uint64_t sequence_ = 0;
  uint32_t next_chunk_ = 0;
};

}  // namespace fullshard

#endif  // FULLSHARD_CORE_SHM_BACKEND_H_
