#include "fullshard/sharding/shared_masters.h"

#include <algorithm>

#include "fullshard/core/watchdog.h"

namespace fullshard::internal {
namespace {

bool can_be_shared(const Unit& unit) {
  return std::all_of(unit.flats.begin(), unit.flats.end(), [](const auto& f) {
    return f->placement().device.is_cpu() && !f->placement().offload &&
           f->storage_dtype() == f->placement().compute_dtype;
  });
}

}  // namespace

SharedMasters::SharedMasters(ShmBackend& group,
                             const std::vector<std::unique_ptr<Unit>>& units)
    : places_(units.size(), nullptr) {
  int64_t num_bytes = 0;
  for (const auto& unit : units) {
    if (can_be_shared(*unit)) num_bytes += unit->slot_bytes();
  }
  memory_ = group.allocate_shared(num_bytes);
  signals_ = group.make_signals(kNumSignals);
  char* next = static_cast<char*>(memory_.data_ptr());
  for (const auto& unit : units) {
    if (!can_be_shared(*unit)) continue;
    places_[static_cast<size_t>(unit->index)] = next;
    for (size_t i = 0; i < unit->flats.size(); ++i) {
      flats_.push_back(unit->flats[i]);
      flats_.back()->share_master(next + unit->slot_offset(i), memory_);
    }
    next += unit->slot_bytes();
  }
}

void SharedMasters::enter() {
  if (reading_) return;
  for (const auto& flat : flats_) flat->publish_master();
  reading_ = true;
  all_entered_ = false;
  signals_->post(kEntered, ++phase_);
}

void SharedMasters::read(const Unit& unit) {
  if (!reading_) return enter();
  for (const auto& flat : unit.flats) {
    TORCH_CHECK(flat->master_is_published(), "local parameters of unit '",
                unit.name,
                "' were changed while ranks may be reading them; call "
                "reshard() of the sharded module, on every rank, after "
                "changing them outside of a training step");
  }
}

void SharedMasters::wait_until_all_entered() {
  if (all_entered_) return;
  signals_->wait_all(kEntered, phase_, "all_gather");
  all_entered_ = true;
}

void SharedMasters::leave(const char* what) {
  if (flats_.empty()) return;
  if (!reading_) enter();
  CollectiveScope scope(what, nullptr, phase_);
  signals_->post(kLeft, phase_);
  signals_->wait_all(kLeft, phase_, what);
  reading_ = false;
}

}  // namespace fullshard::internal
