#ifndef FULLSHARD_SHARDING_GRADIENT_NORM_H_
#define FULLSHARD_SHARDING_GRADIENT_NORM_H_

#include "ATen/core/Tensor.h"

namespace fullshard::internal {

// Returns the p-norm (p > 0 or infinity) of the elements of a 1-D floating
// tensor; 0 if it is empty. Sums in float over rows of moderate length, and in
// double over the rows, so that a large shard loses no digits.
double norm_by_rows(const at::Tensor& values, double p);

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_GRADIENT_NORM_H_
