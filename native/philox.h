// Philox4x32-10 (Salmon et al., SC 2011), eight counters at a time. Holds no state.
#pragma once

#include "vec.h"

namespace paceline {

// The high and low words of the eight 32 x 32 bit products of a and the constant m.
inline void multiply(u32x8 a, uint32_t m, u32x8& high, u32x8& low) {
#if defined(__AVX2__)
  __m256i factor = _mm256_set1_epi32(static_cast<int>(m));
  __m256i even = _mm256_mul_epu32((__m256i)a, factor);
  __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
  high = (u32x8)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = (u32x8)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
#else
  for (int i = 0; i < kLanes; ++i) {
    uint64_t product = static_cast<uint64_t>(a[i]) * m;
    high[i] = static_cast<uint32_t>(product >> 32);
    low[i] = static_cast<uint32_t>(product);
  }
#endif
}

// words[w][lane]: word w of the block with counter (position, first_block + lane, 0, 0).
inline void philox(uint64_t key, uint32_t position, uint32_t first_block, u32x8 words[4]) {
  u32x8 c0 = u32x8{} + position;
  u32x8 c1 = (u32x8{0, 1, 2, 3, 4, 5, 6, 7}) + first_block;
  u32x8 c2 = {}, c3 = {};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    u32x8 high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, high0, low0);
    multiply(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// Reorders words[w][lane] of four-word blocks into token order, eight consecutive tokens per vector.
inline void to_token_order(u32x8 words[4]) {
#if defined(__AVX2__)
  __m256i low01 = _mm256_unpacklo_epi32((__m256i)words[0], (__m256i)words[1]);
  __m256i high01 = _mm256_unpackhi_epi32((__m256i)words[0], (__m256i)words[1]);
  __m256i low23 = _mm256_unpacklo_epi32((__m256i)words[2], (__m256i)words[3]);
  __m256i high23 = _mm256_unpackhi_epi32((__m256i)words[2], (__m256i)words[3]);
  __m256i blocks04 = _mm256_unpacklo_epi64(low01, low23), blocks15 = _mm256_unpackhi_epi64(low01, low23);
  __m256i blocks26 = _mm256_unpacklo_epi64(high01, high23), blocks37 = _mm256_unpackhi_epi64(high01, high23);
  words[0] = (u32x8)_mm256_permute2x128_si256(blocks04, blocks15, 0x20);
  words[1] = (u32x8)_mm256_permute2x128_si256(blocks26, blocks37, 0x20);
  words[2] = (u32x8)_mm256_permute2x128_si256(blocks04, blocks15, 0x31);
  words[3] = (u32x8)_mm256_permute2x128_si256(blocks26, blocks37, 0x31);
#else
  uint32_t flat[4 * kLanes];
  for (int lane = 0; lane < kLanes; ++lane)
    for (int w = 0; w < 4; ++w) flat[4 * lane + w] = words[w][lane];
  std::memcpy(words, flat, sizeof flat);
#endif
}

// Uniform in (0, 1): (word + 1/2) / 2^32 rounded to float and kept below 1.
inline f32x8 uniform(u32x8 words) {
  // The two halves are exact floats, so their sum rounds once, as a direct conversion would.
  f32x8 value = __builtin_convertvector((i32x8)(words >> 16), f32x8) * 65536.0f +
                __builtin_convertvector((i32x8)(words & 0xFFFF), f32x8);
  value = value * 0x1p-32f + 0x1p-33f;
  return select(value > 0x1.fffffep-1f, splat(0x1.fffffep-1f), value);
}

// G = -log(-log(1 - v)).
inline f32x8 gumbel(f32x8 v) { return -log(-log1m(v)); }

}  // namespace paceline
