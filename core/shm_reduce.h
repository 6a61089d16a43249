#ifndef FULLSHARD_CORE_SHM_REDUCE_H_
#define FULLSHARD_CORE_SHM_REDUCE_H_

#include <cstdint>
#include <vector>

#include "c10/core/ScalarType.h"

namespace fullshard {

// out[i] = (accumulate ? out[i] : 0) + scale * (sources[0][i] + sources[1][i]
// + ...), added in this order, in one pass over memory.
//
// Sums are taken in float, in double for double sources and in int64 for int64
// sources (scale must be 1 there), and rounded once on the way out. The result
// of an element does not depend on where it lies, so ranks that sum the same
// values get the same bits.
//
// `out` may be one of the sources, or overlap none of them.
// Requires: at least one source; dtypes are float, double, bfloat16, half, or
// int64 for both; anything else is a c10::Error.
void sum_slices(void* out, at::ScalarType out_dtype,
                const std::vector<const void*>& sources,
                at::ScalarType source_dtype, int64_t numel, float scale,
                bool accumulate);

// out[i] = the largest (or smallest) of sources[.][i]; NaN where any is NaN.
// Requires: as above, with one dtype for all.
void max_slices(void* out, const std::vector<const void*>& sources,
                at::ScalarType dtype, int64_t numel);
void min_slices(void* out, const std::vector<const void*>& sources,
                at::ScalarType dtype, int64_t numel);

}  // namespace fullshard

#endif  // FULLSHARD_CORE_SHM_REDUCE_H_
