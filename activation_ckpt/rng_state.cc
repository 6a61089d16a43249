#include "fullshard/activation_ckpt/rng_state.h"

#include <mutex>

#include "ATen/Context.h"
#include "ATen/core/Generator.h"

namespace fullshard::internal {

RngState RngState::capture() {
  RngState state;
  std::vector<c10::Device> devices = {c10::Device(c10::kCPU)};
  if (at::globalContext().hasCUDA()) {
    devices.push_back(
        at::globalContext().defaultGenerator(c10::Device(c10::kCUDA)).device());
  }
  for (const c10::Device device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    state.states_.emplace_back(device, generator.get_state());
  }
  return state;
}

void RngState::restore() const {
  for (const auto& [device, saved] : states_) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(saved);
  }
}

}  // namespace fullshard::internal
