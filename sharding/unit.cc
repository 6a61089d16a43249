#include "fullshard/sharding/unit.h"

namespace fullshard::internal {
namespace {

// Flat parameters of one unit start on cache lines.
int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

bool encloses(const Unit& outer, const Unit& inner) {
  for (const Unit* u = inner.parent; u != nullptr; u = u->parent) {
    if (u == &outer) return true;
  }
  return false;
}

}  // namespace

int64_t Unit::slot_offset(size_t flat) const {
  int64_t offset = 0;
  for (size_t i = 0; i < flat; ++i) offset += aligned(flats[i]->padded_bytes());
  return offset;
}

int64_t Unit::slot_bytes() const { return slot_offset(flats.size()); }

int64_t Unit::reduce_offset(size_t flat) const {
  int64_t offset = 0;
  for (size_t i = 0; i < flat; ++i) {
    if (!flats[i]->placement().trainable) continue;
    offset += aligned(flats[i]->layout().padded() *
                      static_cast<int64_t>(c10::elementSize(reduce_dtype)));
  }
  return offset;
}

int64_t Unit::reduce_bytes() const { return reduce_offset(flats.size()); }

void Unit::write_own_slices() const {
  for (size_t i = 0; i < flats.size(); ++i) {
    flats[i]->write_own_slice(slot.memory + slot_offset(i));
  }
}

bool Unit::has_views() const {
  for (const auto& flat : flats) {
    if (flat->has_views()) return true;
  }
  return false;
}

uint64_t Unit::generation() const {
  uint64_t sum = 0;
  for (const auto& flat : flats) sum += flat->generation();
  return sum;
}

bool Unit::handed_out() const {
  for (const auto& flat : flats) {
    if (flat->handed_out()) return true;
  }
  return false;
}

bool Unit::related_to(const Unit& other) const {
  return encloses(*this, other) || encloses(other, *this);
}

std::string Unit::misuse() {
  for (const auto& flat : flats) {
    std::string message = flat->misuse();
    if (!message.empty()) return message;
  }
  return "";
}

}  // namespace fullshard::internal
