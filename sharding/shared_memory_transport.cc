#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/shm_backend.h"
#include "fullshard/core/shm_reduce.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/sharding/shared_masters.h"
#include "fullshard/sharding/transport.h"

namespace fullshard::internal {
namespace {

// Three, so that a fast rank can write the next unit while a slow one still
// reads the last.
constexpr int kNumRotatingSlots = 3;

// A rank may be this many reductions ahead of the slowest. Without memory for
// gathers there is room for more.
constexpr int kNumReduceBuffers = 2;
constexpr int kNumReduceBuffersWithoutSlots = 4;

// In the tag of a reduction, beside the unit: the rank's backward reached it.
constexpr uint32_t kUsed = 1u << 31;

// [Note: Home slots]
// Units whose masters are not shared are gathered into slots. All ranks must
// gather a unit into the same pages, whatever each of them still holds. So the
// slot of a unit follows from its index alone: units that enclose others and
// units that stay unsharded have one each, the rest take turns. A rank whose
// home slot still holds another unit that it cannot give up (a live view, an
// operator on several units) moves that one to memory of its own: views follow,
// for they share the StorageImpl.
//
// Each slot has a generation. Before writing generation g + 1, a rank waits
// until all have released g; before reading, until all have written g + 1. The
// written signal carries the unit, so that ranks that went different ways get
// an error in place of each other's bytes.
class SharedMemoryTransport final : public Transport {
 public:
  SharedMemoryTransport(ShmBackend& group,
                        const std::vector<std::unique_ptr<Unit>>& units)
      : group_(group), masters_(group, units) {
    int64_t reduce_bytes = 0;
    int num_rotating = 0;
    std::vector<int64_t> bytes;
    std::vector<int> rotating;  // Slots that took turns so far.
    for (const auto& unit : units) {
      unit_names_.push_back(unit->name);
      reduce_bytes = std::max(reduce_bytes, unit->reduce_bytes());
      if (masters_.memory(*unit) != nullptr) {
        home_.push_back(-1);
        continue;
      }
      int slot = static_cast<int>(bytes.size());
      if (unit->has_children || !unit->reshard_after_forward) {
        bytes.push_back(0);
      } else if (num_rotating++ < kNumRotatingSlots) {
        rotating.push_back(slot);
        bytes.push_back(0);
      } else {
        slot = rotating[static_cast<size_t>((num_rotating - 1) %
                                            kNumRotatingSlots)];
      }
      home_.push_back(slot);
      int64_t& size = bytes[static_cast<size_t>(slot)];
      size = std::max(size, unit->slot_bytes());
    }
    for (int64_t num_bytes : bytes) {
      slots_.push_back({group.allocate_shared(num_bytes), 0, nullptr});
    }
    const int num_slots = std::max(1, static_cast<int>(slots_.size()));
    written_ = group.make_signals(num_slots);
    released_ = group.make_signals(num_slots);
    reduce_buffers_.resize(slots_.empty() ? kNumReduceBuffersWithoutSlots
                                          : kNumReduceBuffers);
    const int num_buffers = static_cast<int>(reduce_buffers_.size());
    ready_ = group.make_signals(num_buffers);
    done_ = group.make_signals(num_buffers);
    for (auto& buffer : reduce_buffers_) {
      buffer.memory =
          group.allocate_symmetric(std::max<int64_t>(reduce_bytes, 1));
    }
  }

  void start_gather(Unit& unit) override {
    if (char* memory = masters_.memory(unit)) {
      unit.slot.memory = memory;
      unit.slot.shared_masters = true;
      masters_.read(unit);
      return;
    }
    const int index = home_[static_cast<size_t>(unit.index)];
    Slot& slot = slots_[static_cast<size_t>(index)];
    if (slot.occupant != nullptr) move_out(*slot.occupant);
    CollectiveScope scope("all_gather", &unit.name, ++sequence_);
    released_->wait_all(index, slot.generation, "all_gather");
    ++slot.generation;
    slot.occupant = &unit;
    unit.slot.index = index;
    unit.slot.memory = static_cast<char*>(slot.memory.data_ptr());
    unit.write_own_slices();
    written_->post(index, slot.generation, static_cast<uint32_t>(unit.index));
  }

  void finish_gather(Unit& unit) override {
    CollectiveScope scope("all_gather", &unit.name, sequence_);
    if (masters_.memory(unit) != nullptr) {
      masters_.wait_until_all_entered();
      return;
    }
    if (unit.slot.index < 0) return;  // Moved out, so it was complete.
    const Slot& slot = slots_[static_cast<size_t>(unit.slot.index)];
    written_->wait_all(unit.slot.index, slot.generation, "all_gather");
    check_same_unit(*written_, unit.slot.index, unit, "gather");
  }

  // Between forward and backward the unit lies in pages of the whole host:
  // there is no traffic that a reshard group could save.
  void release(Unit& unit, bool /*until_backward*/) override {
    if (unit.slot.index >= 0) release_slot(unit.slot.index);
    unit.slot = Unit::Slot();
  }

  void contribute(Unit& unit) override {
    if (shares_masters(unit)) return;
    if (unit.slot.index >= 0) move_out(unit);
    Unit::Slot elsewhere;
    std::swap(unit.slot, elsewhere);
    start_gather(unit);
    finish_gather(unit);
    release(unit, /*until_backward=*/false);
    std::swap(unit.slot, elsewhere);
  }

  bool shares_masters(const Unit& unit) const override {
    return masters_.memory(unit) != nullptr;
  }
  bool reading() const override { return masters_.reading(); }
  void enter_reads() override { masters_.enter(); }
  void leave_reads(const char* what) override { masters_.leave(what); }

  int max_unfinished_reductions() const override {
    return static_cast<int>(reduce_buffers_.size()) - 1;
  }

  bool sums_in_float() const override { return true; }
  bool reads_own_gradients() const override { return true; }

  bool reduction_is_ready() const override {
    const ReduceBuffer& buffer = reduce_buffers_[finishing_];
    for (int rank = 0; rank < group_.getSize(); ++rank) {
      if (!ready_->reached(signal(finishing_), rank, buffer.generation)) {
        return false;
      }
    }
    return true;
  }

  char* acquire_reduce_buffer(Unit& unit) override {
    ReduceBuffer& buffer = reduce_buffers_[filling_];
    CollectiveScope scope("reduce_scatter", &unit.name, ++sequence_);
    done_->wait_all(signal(filling_), buffer.generation, "reduce_scatter");
    ++buffer.generation;
    return static_cast<char*>(
        buffer.memory[static_cast<size_t>(group_.getRank())].data_ptr());
  }

  void start_reduce(Unit& unit, bool used) override {
    ready_->post(signal(filling_), reduce_buffers_[filling_].generation,
                 static_cast<uint32_t>(unit.index) | (used ? kUsed : 0));
    filling_ = (filling_ + 1) % reduce_buffers_.size();
  }

  bool finish_reduce(Unit& unit, const std::vector<Reduced>& outputs) override {
    const ReduceBuffer& buffer = reduce_buffers_[finishing_];
    const int signal = this->signal(finishing_);
    finishing_ = (finishing_ + 1) % reduce_buffers_.size();
    CollectiveScope scope("reduce_scatter", &unit.name, sequence_);
    ready_->wait_all(signal, buffer.generation, "reduce_scatter");
    check_same_unit(*ready_, signal, unit, "reduction");
    bool used = false;
    for (int rank = 0; rank < group_.getSize(); ++rank) {
      used = used || (ready_->tag(signal, rank) & kUsed) != 0;
    }
    if (used) add_slices(unit, buffer, outputs);
    done_->post(signal, buffer.generation);
    return used;
  }

  Memory memory() const override {
    Memory memory;
    const auto own_rank = static_cast<size_t>(group_.getRank());
    for (const ReduceBuffer& buffer : reduce_buffers_) {
      memory.reduce_buffers +=
          static_cast<int64_t>(buffer.memory[own_rank].nbytes());
    }
    if (own_rank != 0) return memory;
    for (const Slot& slot : slots_) {
      memory.slots += static_cast<int64_t>(slot.memory.nbytes());
    }
    memory.shared_masters = masters_.num_bytes();
    return memory;
  }

 private:
  struct Slot {
    at::Tensor memory;
    uint32_t generation = 0;
    Unit* occupant = nullptr;  // The unit of ours that is in it.
  };
  struct ReduceBuffer {
    std::vector<at::Tensor> memory;  // One per rank.
    uint32_t generation = 0;
  };

  static int signal(size_t buffer) { return static_cast<int>(buffer); }

  void add_slices(const Unit& unit, const ReduceBuffer& buffer,
                  const std::vector<Reduced>& outputs) {
    const auto own_rank = static_cast<size_t>(group_.getRank());
    for (const Reduced& out : outputs) {
      const ShardLayout& layout = unit.flats[out.flat]->layout();
      const auto element_size =
          static_cast<int64_t>(c10::elementSize(unit.reduce_dtype));
      const int64_t offset = unit.reduce_offset(out.flat) +
                             layout.chunk * group_.getRank() * element_size;
      sources_.clear();
      for (const at::Tensor& memory : buffer.memory) {
        sources_.push_back(static_cast<const char*>(memory.const_data_ptr()) +
                           offset);
      }
      if (out.own.empty()) {
        sum_into(out, unit.reduce_dtype, 0, layout.chunk);
        continue;
      }
      int64_t begin = 0;
      for (const FlatParameter::Piece& piece : out.own) {
        sources_[own_rank] = piece.data;
        sum_into(out, unit.reduce_dtype, begin, piece.numel);
        begin += piece.numel;
        for (const void*& source : sources_) {
          source =
              static_cast<const char*>(source) + piece.numel * element_size;
        }
      }
    }
  }

  void release_slot(int index) {
    Slot& slot = slots_[static_cast<size_t>(index)];
    slot.occupant = nullptr;
    released_->post(index, slot.generation);
  }

  void move_out(Unit& unit) {
    if (!logged_move_) {
      log_info(absl::StrCat("unit '", unit.name,
                            "' is needed beside units that share its slot and "
                            "is copied to memory of its own"));
      logged_move_ = true;
    }
    if (unit.state == UnitState::kGathering) finish_gather(unit);
    c10::InferenceMode ordinary_tensors(false);
    at::NoGradGuard no_grad;
    at::Tensor memory = at::empty({unit.slot_bytes()}, at::kByte);
    char* to = static_cast<char*>(memory.data_ptr());
    std::memcpy(to, unit.slot.memory, static_cast<size_t>(unit.slot_bytes()));
    if (unit.state == UnitState::kUnsharded) {
      for (size_t i = 0; i < unit.flats.size(); ++i) {
        unit.flats[i]->relocate(to + unit.slot_offset(i));
      }
    }
    release_slot(unit.slot.index);
    unit.slot.index = -1;
    unit.slot.memory = to;
    unit.slot.private_memory = std::move(memory);
  }

  // Sums elements [begin, begin + numel) of the shard, which sources_ point at.
  void sum_into(const Reduced& out, at::ScalarType reduce_dtype, int64_t begin,
                int64_t numel) {
    const at::ScalarType dtype = out.shard.scalar_type();
    if (dtype == at::kFloat || dtype == reduce_dtype) {
      void* to = static_cast<char*>(out.shard.data_ptr()) +
                 begin * static_cast<int64_t>(c10::elementSize(dtype));
      sum_slices(to, dtype, sources_, reduce_dtype, numel,
                 static_cast<float>(out.scale), out.accumulate);
      return;
    }
    at::NoGradGuard no_grad;
    at::Tensor sum = at::empty({numel}, at::kFloat);
    sum_slices(sum.data_ptr(), at::kFloat, sources_, reduce_dtype, numel,
               static_cast<float>(out.scale), /*accumulate=*/false);
    at::Tensor part = out.shard.narrow(0, begin, numel);
    if (out.accumulate) {
      part.add_(sum);
    } else {
      part.copy_(sum);
    }
  }

  void check_same_unit(const ShmSignals& signals, int signal, const Unit& unit,
                       const char* what) const {
    for (int rank = 0; rank < signals.num_ranks(); ++rank) {
      const uint32_t theirs = signals.tag(signal, rank) & ~kUsed;
      TORCH_CHECK(theirs == static_cast<uint32_t>(unit.index),
                  "ranks take different paths through the model: at ", what,
                  " #", sequence_, " rank ", group_.getRank(), " is at unit '",
                  unit.name, "', rank ", rank, " at unit '",
                  unit_names_[theirs], "'");
    }
  }

  ShmBackend& group_;
  std::vector<std::string> unit_names_;
  SharedMasters masters_;
  std::vector<int> home_;  // By unit index; -1 if its masters are shared.
  std::vector<Slot> slots_;
  std::unique_ptr<ShmSignals> written_;
  std::unique_ptr<ShmSignals> released_;
  std::unique_ptr<ShmSignals> ready_;
  std::unique_ptr<ShmSignals> done_;
  std::vector<ReduceBuffer> reduce_buffers_;
  size_t filling_ = 0;    // The buffer of the next reduction to start,
  size_t finishing_ = 0;  // and of the oldest that is unfinished.
  uint64_t sequence_ = 0;
  bool logged_move_ = false;
  std::vector<const void*> sources_;
};

}  // namespace

std::unique_ptr<Transport> make_shared_memory_transport(
    ShmBackend& shard_group, const std::vector<std::unique_ptr<Unit>>& units) {
  return std::make_unique<SharedMemoryTransport>(shard_group, units);
}

}  // namespace fullshard::internal
