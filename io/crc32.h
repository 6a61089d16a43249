#ifndef FULLSHARD_IO_CRC32_H_
#define FULLSHARD_IO_CRC32_H_

#include <cstddef>
#include <cstdint>

namespace fullshard {

// Returns the CRC-32 of ZIP and zlib over the bytes that gave `crc` (0 for
// none) followed by `data`. Uses carry-less multiplication where the processor
// has it (several times the speed of zlib), else zlib.
uint32_t crc32(uint32_t crc, const void* data, size_t size);

// Returns the CRC-32 of two pieces, one after the other, from that of each and
// the size of the second.
uint32_t crc32_combine(uint32_t first, uint32_t second, int64_t second_bytes);

}  // namespace fullshard

#endif  // FULLSHARD_IO_CRC32_H_
