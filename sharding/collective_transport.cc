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
                      c10::intrusive_ptr<c10d::Backend> reshard_group,
                      const std::vector<std::unique_ptr<Unit>>& units)
      : device_(device),
        group_(std::move(group)),
        reshard_group_(std::move(reshard_group)),
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
    Gather& gather = gathers_[static_cast<size_t>(unit.index)];
    const at::Tensor part = std::exchange(gather.part, {});
    const bool from_part =
        part.defined() && gather.part_generation == unit.generation();
    if (!from_part) unit.write_own_slices();
    if (num_ranks_ == 1) return;
    const auto& group = from_part ? reshard_group_ : group_;
    if (gather.memory != unit.slot.memory || gather.group != group.get()) {
      prepare(unit, gather, *group);
    }
    if (from_part) copy_part(part, gather, /*to_slot=*/true);
    CollectiveScope scope("all_gather", &unit.name, ++sequence_);
    for (Gather::Piece& piece : gather.pieces) {
      piece.work = group->_allgather_base(piece.full, piece.own);
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

  void release(Unit& unit, bool until_backward) override {
    Gather& gather = gathers_[static_cast<size_t>(unit.index)];
    gather.part = at::Tensor();
    if (until_backward && reshard_group_) keep_part(unit, gather);
    slots_[static_cast<size_t>(unit.slot.index)].used = false;
    unit.slot = Unit::Slot();
  }

  void contribute(Unit& unit) override {
    if (num_ranks_ == 1) return;
    const at::Tensor memory = allocate(unit.slot_bytes());
    Unit::Slot elsewhere;
    elsewhere.memory = static_cast<char*>(memory.data_ptr());
    std::swap(unit.slot, elsewhere);
    unit.write_own_slices();
    Gather gather;
    prepare(unit, gather, *group_);
    std::swap(unit.slot, elsewhere);
    CollectiveScope scope("all_gather", &unit.name, ++sequence_);
    for (Gather::Piece& piece : gather.pieces) {
      WatchedWait watched("all_gather", kWatchdogTimeout);
      group_->_allgather_base(piece.full, piece.own)->wait();
    }
  }

  void forget_kept_parts() override {
    for (Gather& gather : gathers_) gather.part = at::Tensor();
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

  Memory memory() const override {
    Memory memory;
    for (const Slot& slot : slots_) {
      memory.slots += static_cast<int64_t>(slot.memory.nbytes());
    }
    for (const Gather& gather : gathers_) {
      if (gather.part.defined()) memory.slots += gather.part.numel();
    }
    for (const at::Tensor& buffer : reduce_buffers_) {
      if (buffer.defined()) memory.reduce_buffers += buffer.numel();
    }
    return memory;
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
    c10d::Backend* group = nullptr;
    std::vector<Piece> pieces;
    // This rank's parts of a copy that the reshard group holds, one after the
    // other; undefined if there is none.
    at::Tensor part;
    uint64_t part_generation = 0;
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

  // [Note: Reshard groups] The ranks of a reshard group of k keep the unit
  // between forward and backward as k equal parts of its padded bytes, 1/k
  // each, so that backward gathers among k ranks and not N.
  void keep_part(const Unit& unit, Gather& gather) {
    prepare(unit, gather, *reshard_group_);
    int64_t num_bytes = 0;
    for (const Gather::Piece& piece : gather.pieces) {
      num_bytes += piece.own.numel();
    }
    gather.part = allocate(num_bytes);
    gather.part_generation = unit.gathered_generation;
    copy_part(gather.part, gather, /*to_slot=*/false);
  }

  static void copy_part(const at::Tensor& part, const Gather& gather,
                        bool to_slot) {
    at::NoGradGuard no_grad;
    int64_t offset = 0;
    for (const Gather::Piece& piece : gather.pieces) {
      const at::Tensor kept = part.narrow(0, offset, piece.own.numel());
      (to_slot ? piece.own : kept).copy_(to_slot ? kept : piece.own);
      offset += piece.own.numel();
    }
  }

  void prepare(const Unit& unit, Gather& gather, c10d::Backend& group) const {
    gather.memory = unit.slot.memory;
    gather.group = &group;
    gather.pieces.clear();
    for (size_t i = 0; i < unit.flats.size(); ++i) {
      const FlatParameter& flat = *unit.flats[i];
      Gather::Piece piece;
      // As bytes: every dtype can be gathered, whatever the backend knows.
      piece.full = bytes_at(unit.slot.memory + unit.slot_offset(i),
                            flat.padded_bytes(), device_);
      const int64_t part_bytes = flat.padded_bytes() / group.getSize();
      piece.own =
          piece.full.narrow(0, group.getRank() * part_bytes, part_bytes);
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
  const c10::intrusive_ptr<c10d::Backend> reshard_group_;  // May be null.
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
  // Without sharding there is nothing to gather.
  auto reshard_group = shard_group->getSize() > 1 ? groups.reshard_group()
                                                  : ProcessGroups::Group();
  return std::make_unique<CollectiveTransport>(
      groups.device(), std::move(shard_group), std::move(reshard_group), units);
}

}  // namespace fullshard::internal
