#ifndef FULLSHARD_MODELS_INIT_H_
#define FULLSHARD_MODELS_INIT_H_

#include <cmath>

#include "c10/core/GradMode.h"
#include "torch/nn/modules/linear.h"

namespace fullshard {

// Draws weights from a normal distribution of deviation 0.6 / sqrt(inputs) and
// zeroes the bias: small residual branches, so that a short run needs no long
// warmup.
inline void init_linear(torch::nn::LinearImpl& linear) {
  at::NoGradGuard no_grad;
  linear.weight.normal_(
      0, 0.6 / std::sqrt(static_cast<double>(linear.weight.size(1))));
  if (linear.bias.defined()) linear.bias.zero_();
}

}  // namespace fullshard

#endif  // FULLSHARD_MODELS_INIT_H_
