#include "fullshard/core/shm_reduce.h"

#include <type_traits>

#include "c10/util/BFloat16.h"
#include "c10/util/Exception.h"
#include "c10/util/Half.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define FULLSHARD_HAS_AVX2_KERNELS 1
#endif

namespace fullshard {
namespace {

using at::BFloat16;
using at::Half;

template <typename Source>
using Accumulator = std::conditional_t<
    std::is_same_v<Source, double>, double,
    std::conditional_t<std::is_same_v<Source, int64_t>, int64_t, float>>;

// Sums elements [begin, numel) one by one.
template <typename Out, typename Source>
void sum_scalar(Out* out, const void* const* sources, size_t num_sources,
                int64_t begin, int64_t numel, float scale, bool accumulate) {
  using Sum = Accumulator<Source>;
  const auto* first = static_cast<const Source*>(sources[0]);
  for (int64_t i = begin; i < numel; ++i) {
    Sum sum = static_cast<Sum>(first[i]);
    for (size_t s = 1; s < num_sources; ++s) {
      sum += static_cast<Sum>(static_cast<const Source*>(sources[s])[i]);
    }
    if constexpr (!std::is_same_v<Sum, int64_t>) sum *= static_cast<Sum>(scale);
    if (accumulate) sum += static_cast<Sum>(out[i]);
    out[i] = static_cast<Out>(sum);
  }
}

#if FULLSHARD_HAS_AVX2_KERNELS

// "fma" is left out on purpose: vector body and scalar tail must round alike.
#define FULLSHARD_AVX2 __attribute__((target("avx2,f16c")))

FULLSHARD_AVX2 inline __m256 load(const float* p) { return _mm256_loadu_ps(p); }
FULLSHARD_AVX2 inline __m256 load(const BFloat16* p) {
  __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
FULLSHARD_AVX2 inline __m256 load(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

FULLSHARD_AVX2 inline void store(float* p, __m256 value) {
  _mm256_storeu_ps(p, value);
}
FULLSHARD_AVX2 inline void store(Half* p, __m256 value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
// Rounds to nearest even; NaN becomes the NaN that c10 makes of it.
FULLSHARD_AVX2 inline void store(BFloat16* p, __m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd =
      _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded =
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  rounded = _mm256_srli_epi32(rounded, 16);
  const __m256i is_nan =
      _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(rounded),
                                          _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

// kSources 0: as many as `num_sources` says. Returns where the tail begins.
template <typename Out, typename Source, int kSources>
FULLSHARD_AVX2 int64_t sum_avx2(Out* out, const void* const* sources,
                                size_t num_sources, int64_t numel, float scale,
                                bool accumulate) {
  const size_t n = kSources > 0 ? kSources : num_sources;
  const __m256 factor = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 16 <= numel; i += 16) {
    __m256 low = load(static_cast<const Source*>(sources[0]) + i);
    __m256 high = load(static_cast<const Source*>(sources[0]) + i + 8);
    for (size_t s = 1; s < n; ++s) {
      const Source* source = static_cast<const Source*>(sources[s]) + i;
      low = _mm256_add_ps(low, load(source));
      high = _mm256_add_ps(high, load(source + 8));
    }
    low = _mm256_mul_ps(low, factor);
    high = _mm256_mul_ps(high, factor);
    if (accumulate) {
      low = _mm256_add_ps(low, load(out + i));
      high = _mm256_add_ps(high, load(out + i + 8));
    }
    store(out + i, low);
    store(out + i + 8, high);
  }
  return i;
}

template <typename Out, typename Source>
FULLSHARD_AVX2 int64_t sum_avx2_any(Out* out, const void* const* sources,
                                    size_t num_sources, int64_t numel,
                                    float scale, bool accumulate) {
  switch (num_sources) {
#define FULLSHARD_CASE(n)                                                    \
  case n:                                                                    \
    return sum_avx2<Out, Source, n>(out, sources, num_sources, numel, scale, \
                                    accumulate);
    FULLSHARD_CASE(1)
    FULLSHARD_CASE(2)
    FULLSHARD_CASE(3)
    FULLSHARD_CASE(4)
    FULLSHARD_CASE(8)
#undef FULLSHARD_CASE
    default:
      return sum_avx2<Out, Source, 0>(out, sources, num_sources, numel, scale,
                                      accumulate);
  }
}

bool has_avx2() {
  // Every processor with AVX2 has F16C, which clang 14 cannot ask for.
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}

#endif  // FULLSHARD_HAS_AVX2_KERNELS

template <typename Out, typename Source>
void sum_typed(void* out_data, const void* const* sources, size_t num_sources,
               int64_t numel, float scale, bool accumulate) {
  Out* out = static_cast<Out*>(out_data);
  int64_t done = 0;
#if FULLSHARD_HAS_AVX2_KERNELS
  if constexpr (std::is_same_v<Accumulator<Source>, float> &&
                !std::is_same_v<Out, double>) {
    if (has_avx2()) {
      done = sum_avx2_any<Out, Source>(out, sources, num_sources, numel, scale,
                                       accumulate);
    }
  }
#endif
  sum_scalar<Out, Source>(out, sources, num_sources, done, numel, scale,
                          accumulate);
}

template <typename Source>
void sum_into(void* out, at::ScalarType out_dtype, const void* const* sources,
              size_t num_sources, int64_t numel, float scale, bool accumulate) {
  switch (out_dtype) {
    case at::kFloat:
      return sum_typed<float, Source>(out, sources, num_sources, numel, scale,
                                      accumulate);
    case at::kDouble:
      return sum_typed<double, Source>(out, sources, num_sources, numel, scale,
                                       accumulate);
    case at::kBFloat16:
      return sum_typed<BFloat16, Source>(out, sources, num_sources, numel,
                                         scale, accumulate);
    case at::kHalf:
      return sum_typed<Half, Source>(out, sources, num_sources, numel, scale,
                                     accumulate);
    default:
      TORCH_CHECK(false, "cannot sum floating values into ", out_dtype);
  }
}

template <typename T, bool kMax>
void extreme(void* out_data, const std::vector<const void*>& sources,
             int64_t numel) {
  T* out = static_cast<T*>(out_data);
  for (int64_t i = 0; i < numel; ++i) {
    T best = static_cast<const T*>(sources[0])[i];
    for (size_t s = 1; s < sources.size(); ++s) {
      const T value = static_cast<const T*>(sources[s])[i];
      const bool better = kMax ? value > best : value < best;
      if (better || value != value) best = value;
      // A NaN that is already there stays: it is never "better" than itself.
    }
    out[i] = best;
  }
}

template <bool kMax>
void extreme_slices(void* out, const std::vector<const void*>& sources,
                    at::ScalarType dtype, int64_t numel) {
  switch (dtype) {
    case at::kFloat:
      return extreme<float, kMax>(out, sources, numel);
    case at::kDouble:
      return extreme<double, kMax>(out, sources, numel);
    case at::kBFloat16:
      return extreme<BFloat16, kMax>(out, sources, numel);
    case at::kHalf:
      return extreme<Half, kMax>(out, sources, numel);
    case at::kLong:
      return extreme<int64_t, kMax>(out, sources, numel);
    default:
      TORCH_CHECK(false, "cannot take the ", kMax ? "maximum" : "minimum",
                  " of ", dtype);
  }
}

}  // namespace

void sum_slices(void* out, at::ScalarType out_dtype,
                const std::vector<const void*>& sources,
                at::ScalarType source_dtype, int64_t numel, float scale,
                bool accumulate) {
  TORCH_CHECK(!sources.empty(), "nothing to sum");
  const void* const* data = sources.data();
  const size_t n = sources.size();
  switch (source_dtype) {
    case at::kFloat:
      return sum_into<float>(out, out_dtype, data, n, numel, scale, accumulate);
    case at::kDouble:
      return sum_into<double>(out, out_dtype, data, n, numel, scale,
                              accumulate);
    case at::kBFloat16:
      return sum_into<BFloat16>(out, out_dtype, data, n, numel, scale,
                                accumulate);
    case at::kHalf:
      return sum_into<Half>(out, out_dtype, data, n, numel, scale, accumulate);
    case at::kLong:
      TORCH_CHECK(out_dtype == at::kLong && scale == 1,
                  "int64 is summed into int64 without a scale, not into ",
                  out_dtype);
      return sum_scalar<int64_t, int64_t>(static_cast<int64_t*>(out), data, n,
                                          0, numel, scale, accumulate);
    default:
      TORCH_CHECK(false, "cannot sum ", source_dtype);
  }
}

void max_slices(void* out, const std::vector<const void*>& sources,
                at::ScalarType dtype, int64_t numel) {
  extreme_slices<true>(out, sources, dtype, numel);
}

void min_slices(void* out, const std::vector<const void*>& sources,
                at::ScalarType dtype, int64_t numel) {
  extreme_slices<false>(out, sources, dtype, numel);
}

}  // namespace fullshard
