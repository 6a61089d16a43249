#include "fullshard/io/crc32.h"

#include <zlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fullshard {
namespace {

uint32_t crc32_zlib(uint32_t crc, const unsigned char* data, size_t size) {
  return static_cast<uint32_t>(::crc32_z(crc, data, size));
}

#if defined(__x86_64__)

#define FULLSHARD_CLMUL __attribute__((target("pclmul,sse4.1")))

FULLSHARD_CLMUL inline __m128i load(const unsigned char* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Moves `x` over the next 16 bytes `next` by the folding constants `k`.
FULLSHARD_CLMUL inline __m128i fold(__m128i x, __m128i k, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(x, k, 0x00);
  const __m128i high = _mm_clmulepi64_si128(x, k, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ"
// (Intel, 2009), bit-reflected form. Requires size >= 64 and size % 16 == 0.
FULLSHARD_CLMUL uint32_t crc32_clmul(uint32_t crc, const unsigned char* data,
                                     size_t size) {
  const __m128i fold_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i fold_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i fold_4 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);

  __m128i a =
      _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(~crc)));
  __m128i b = load(data + 16);
  __m128i c = load(data + 32);
  __m128i d = load(data + 48);
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
    a = fold(a, fold_64, load(data));
    b = fold(b, fold_64, load(data + 16));
    c = fold(c, fold_64, load(data + 32));
    d = fold(d, fold_64, load(data + 48));
  }
  a = fold(fold(fold(a, fold_16, b), fold_16, c), fold_16, d);
  for (; size >= 16; data += 16, size -= 16) a = fold(a, fold_16, load(data));

  a = _mm_xor_si128(_mm_srli_si128(a, 8),
                    _mm_clmulepi64_si128(a, fold_16, 0x10));
  b = _mm_srli_si128(a, 4);
  a = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), fold_4, 0x00);
  a = _mm_xor_si128(a, b);

  b = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), barrett, 0x10);
  b = _mm_clmulepi64_si128(_mm_and_si128(b, low_words), barrett, 0x00);
  return ~static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, b), 1));
}

#endif

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, size_t size) {
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool has_clmul =
      __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (has_clmul && size >= 64) {
    const size_t folded = size & ~size_t{15};
    crc = crc32_clmul(crc, bytes, folded);
    bytes += folded;
    size -= folded;
  }
#endif
  return crc32_zlib(crc, bytes, size);
}

uint32_t crc32_combine(uint32_t first, uint32_t second, int64_t second_bytes) {
  static_assert(sizeof(z_off_t) == sizeof(int64_t));
  return static_cast<uint32_t>(
      ::crc32_combine(first, second, static_cast<z_off_t>(second_bytes)));
}

}  // namespace fullshard
