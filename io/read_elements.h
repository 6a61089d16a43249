#ifndef FULLSHARD_IO_READ_ELEMENTS_H_
#define FULLSHARD_IO_READ_ELEMENTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace fullshard {

// Copies elements [begin, begin + out.numel()) of `tensor`, counted in a memory
// in which its dimensions have that order (core/memory_order.h), to `out`, 1-D
// and contiguous, in its dtype. Of a tensor that maps a file, which nobody has
// written to, the bytes are read from the file and no page of it is mapped;
// where its dtype and order are those asked for, these bytes only.
//
// Errors: DataLoss if the file was cut short; what the system reports.
absl::Status read_elements(const at::Tensor& tensor,
                           const std::vector<int64_t>& order, int64_t begin,
                           at::Tensor out);

// Has the system fetch the start of what read_elements will read, where it
// reads only the bytes that are asked for. Returns at once; does nothing for a
// tensor in memory.
void read_elements_ahead(const at::Tensor& tensor,
                         const std::vector<int64_t>& order, int64_t begin,
                         int64_t numel);

}  // namespace fullshard

#endif  // FULLSHARD_IO_READ_ELEMENTS_H_
