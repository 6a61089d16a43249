#ifndef FULLSHARD_ACTIVATION_CKPT_RNG_STATE_H_
#define FULLSHARD_ACTIVATION_CKPT_RNG_STATE_H_

#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"

namespace fullshard::internal {

// The states of the default random generators: the CPU's, and on CUDA builds
// the current device's.
class RngState {
 public:
  static RngState capture();
  void restore() const;

 private:
  std::vector<std::pair<c10::Device, at::Tensor>> states_;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_ACTIVATION_CKPT_RNG_STATE_H_
