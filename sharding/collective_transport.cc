#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/sharding/transport.h"

namespace fullshard::internal {
namespace {

// A backend's own time-out comes first; this one ends a wait that it misses.
constexpr std::chrono::minutes kWatchdogTimeout{30};

at::Tensor bytes_at(char* memory, int64_t num_bytes, c10::Device device) {
  return at::from_blob(memory, {num_bytes},
                       at::TensorOptions(device).dtype(at::kByte));
}

class CollectiveTransport final : public Transport {
 public:
  CollectiveTransport(c10::Device device,
                      c10::intrusive_ptr<c10d::Backend> group,
                      const std::vector<std::unique_ptr<Unit>>& units)
      : device_(device),
        group_(std::move(group)),
        num_ranks_(group_->getSize()),
        gathers_(units.size()) {
    for (const auto& unit : units) {
      if (!unit->has_children) {
        slot_bytes_ = std::max(slot_bytes_, unit->slot_bytes());
        if (!unit->reshard_after_forward) ++expected_slots_;
      }
      reduce_bytes_ = std::max(reduce_bytes_, unit->reduce_bytes());
    }
  }

  void start_gather(Unit& unit) override {
    acquire_slot(unit);
    unit.write_own_slices();
    if (num_ranks_ == 1) return;
    Gather& gather = gathers_[static_cast<size_t>(unit.index)];
    if (gather.memory != unit.slot.memory) prepare(unit, gather);
    CollectiveScope scope("all_gather", &unit.name, ++sequence_);
    for (Gather::Piece& piece : gather.pieces) {
      piece.work = group_->_allgather_base(piece.full, piece.own);
    }
  }

  void finish_gather(Unit& unit) override {
    if (num_ranks_ == 1) return;
    CollectiveScope scope("all_gather", &unit.name, sequence_);
    for (Gather::Piece& piece :
         gathers_[static_cast<size_t>(unit.index)].pieces) {
      WatchedWait watched("all_gather", kWatchdogTimeout);
      piece.work->wait();
      piece.work.reset();
    }
  }

  void release(Unit& unit) override {
    slots_[static_cast<size_t>(unit.slot.index)].used = false;
    unit.slot = Unit::Slot();
  }

  char* acquire_reduce_buffer(Unit&) override {
    // Two buffers: one is being reduced while the next unit fills the other.
    next_buffer_ ^= 1;
    at::Tensor& buffer = reduce_buffers_[next_buffer_];
    if (!buffer.defined()) buffer = allocate(reduce_bytes_);
    return static_cast<char*>(buffer.data_ptr());
  }

  void start_reduce(Unit& unit, bool used) override {
    reducing_ = next_buffer_;
    used_ = used || num_ranks_ > 1;
    if (num_ranks_ == 1) return;
    CollectiveScope scope("reduce_scatter", &unit.name, ++sequence_);
    reductions_.clear();
    for (size_t i = 0; i < unit.flats.size(); ++i) {
      const FlatParameter& flat = *unit.flats[i];
      if (!flat.placement().trainable) continue;
      Reduction reduction;
      reduction.shard = allocate(flat.layout().chunk, unit.reduce_dtype);
      at::Tensor input = gradients(unit, i);
      reduction.work = group_->_reduce_scatter_base(reduction.shard, input);
      reductions_.push_back(std::move(reduction));
    }
  }

  bool finish_reduce(Unit& unit, const std::vector<Reduced>& outputs) override {
    if (!used_) return false;
    at::NoGradGuard no_grad;
    CollectiveScope scope("reduce_scatter", &unit.name, sequence_);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Reduced& out = outputs[i];
      at::Tensor sum;
      if (num_ranks_ == 1) {
        sum = gradients(unit, out.flat);
      } else {
        WatchedWait watched("reduce_scatter", kWatchdogTimeout);
        reductions_[i].work->wait();
        sum = reductions_[i].shard;
      }
      if (out.accumulate) {
        out.shard.add_(sum, out.scale);
      } else {
        out.shard.copy_(sum);
        if (out.scale != 1) out.shard.mul_(out.scale);
      }
    }
    reductions_.clear();
    return true;
  }

 private:
  struct Slot {
    at::Tensor memory;
    int owner = -1;  // The enclosing unit it is kept for, or -1.
    bool used = false;
  };
  struct Gather {
    struct Piece {
      at::Tensor full;
      at::Tensor own;
      c10::intrusive_ptr<c10d::Work> work;
    };
    char* memory = nullptr;
    std::vector<Piece> pieces;
  };
  struct Reduction {
    at::Tensor shard;
    c10::intrusive_ptr<c10d::Work> work;
  };

  void acquire_slot(Unit& unit) {
    // An enclosing unit stays unsharded while its children run: it gets memory
    // of its own size, kept for it.
    const int64_t num_bytes =
        unit.has_children ? unit.slot_bytes() : slot_bytes_;
    for (size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      if (!slot.used && slot.owner == (unit.has_children ? unit.index : -1)) {
        return take(unit, i);
      }
    }
    if (!unit.has_children && ++num_leaf_slots_ > expected_slots_) {
      log_info("slot pool grows to " + std::to_string(num_leaf_slots_) +
               " slots: unit '" + unit.name + "' is needed beside others");
    }
    slots_.push_back({allocate(num_bytes), unit.has_children ? unit.index : -1,
                      /*used=*/false});
    take(unit, slots_.size() - 1);
  }

  at::Tensor allocate(int64_t numel, at::ScalarType dtype = at::kByte) const {
    c10::InferenceMode ordinary_tensors(false);
    at::NoGradGuard no_grad;
    return at::empty({numel}, at::TensorOptions(device_).dtype(dtype));
  }

  void take(Unit& unit, size_t index) {
    slots_[index].used = true;
    unit.slot.index = static_cast<int>(index);
    unit.slot.memory = static_cast<char*>(slots_[index].memory.data_ptr());
  }

  void prepare(const Unit& unit, Gather& gather) const {
    gather.memory = unit.slot.memory;
    gather.pieces.clear();
    for (size_t i = 0; i < unit.flats.size(); ++i) {
      const FlatParameter& flat = *unit.flats[i];
      Gather::Piece piece;
      // As bytes: every dtype can be gathered, whatever the backend knows.
      piece.full = bytes_at(unit.slot.memory + unit.slot_offset(i),
                            flat.padded_bytes(), device_);
      const int64_t chunk_bytes = flat.padded_bytes() / num_ranks_;
      piece.own =
          piece.full.narrow(0, group_->getRank() * chunk_bytes, chunk_bytes);
      gather.pieces.push_back(std::move(piece));
    }
  }

  at::Tensor gradients(const Unit& unit, size_t flat) const {
    char* at = static_cast<char*>(reduce_buffers_[reducing_].data_ptr()) +
               unit.reduce_offset(flat);
    return at::from_blob(at, {unit.flats[flat]->layout().padded()},
                         at::TensorOptions(device_).dtype(unit.reduce_dtype));
  }

  const c10::Device device_;
  const c10::intrusive_ptr<c10d::Backend> group_;
  const int num_ranks_;
  int64_t slot_bytes_ = 0;
  int64_t reduce_bytes_ = 0;
  int expected_slots_ = 2;  // One is read while the next is gathered.
  int num_leaf_slots_ = 0;
  uint64_t sequence_ = 0;
  std::vector<Slot> slots_;
  std::vector<Gather> gathers_;
  at::Tensor reduce_buffers_[2];
  int next_buffer_ = 0;
  int reducing_ = 0;
  bool used_ = false;  // By this rank; ranks of a c10d group cannot tell.
  std::vector<Reduction> reductions_;
};

}  // namespace

std::unique_ptr<Transport> make_collective_transport(
    const ProcessGroups& groups, c10::intrusive_ptr<c10d::Backend> shard_group,
    const std::vector<std::unique_ptr<Unit>>& units) {
  return std::make_unique<CollectiveTransport>(groups.device(),
                                               std::move(shard_group), units);
}

}  // namespace fullshard::internal
