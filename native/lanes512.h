// Loads and stores of the first lanes of vectors of 16 floats, from and to float32 and bfloat16 memory.
//
// Only for files compiled with AVX-512 flags. Everything is local, since these files serve other CPUs than the rest.
#pragma once

#include <immintrin.h>

#include "vec.h"

namespace paceline {
namespace {

// Masks of the first `count` lanes; none if it is negative.
inline __mmask32 first_halves(int64_t count) { return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0; }
inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>(first_halves(count)); }

inline __m512 widened(const float* p, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
inline __m512 widened(const bf16* p, __mmask16 lanes) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16);
}

inline void store_lanes(float* p, __m512 x, __mmask16 lanes) { _mm512_mask_storeu_ps(p, lanes, x); }

// As in vec.h, not cvtneps_pbh, which takes subnormals as zero.
inline void store_rounded(bf16* p, __m512 x, __mmask16 lanes) {
  const __m512i bits = (__m512i)x, high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  __m512i half = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  half = _mm512_mask_or_epi32(half, nan, high, _mm512_set1_epi32(0x40));
  _mm512_mask_cvtepi32_storeu_epi16(p, lanes, half);
}
inline void store_rounded(float* p, __m512 x, __mmask16 lanes) { store_lanes(p, x, lanes); }

}  // namespace
}  // namespace paceline
