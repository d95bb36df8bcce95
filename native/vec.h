// Eight-lane float arithmetic with one fixed order of operations, the base of every kernel.
//
// Owns loads, stores, reductions, exp and log. Invariant: an element's result depends on its value only, never on its
// place: tails use the same lanes as full vectors. -ffp-contract=off keeps the compiler from fusing, so a fused
// multiply-add happens exactly where `fma` is written, on every architecture.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace paceline {

constexpr int kLanes = 8;

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef double f64x4 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

inline f32x8 splat(float x) { return f32x8{x, x, x, x, x, x, x, x}; }
inline i32x8 splat_int(int32_t x) { return i32x8{x, x, x, x, x, x, x, x}; }

inline f32x8 fma(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__AVX2__) && defined(__FMA__)
  return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  f32x8 out;
  for (int i = 0; i < kLanes; ++i) out[i] = std::fma(a[i], b[i], c[i]);
  return out;
#endif
}

// Lane by lane: yes where the mask is all ones, no where it is zero.
inline f32x8 select(i32x8 mask, f32x8 yes, f32x8 no) {
#if defined(__AVX2__)
  return (f32x8)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
  return (f32x8)((mask & (i32x8)yes) | (~mask & (i32x8)no));
#endif
}

// a > b ? a : b, so b where either is NaN.
inline f32x8 max(f32x8 a, f32x8 b) {
#if defined(__AVX2__)
  return (f32x8)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}

inline f32x8 load(const float* p) {
  f32x8 out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

inline f32x8 load(const bf16* p) {
  u16x8 raw;
  std::memcpy(&raw, p, sizeof raw);
  return (f32x8)(__builtin_convertvector(raw, u32x8) << 16);
}

inline void store(float* p, f32x8 x) { std::memcpy(p, &x, sizeof x); }

// Round to nearest even; a NaN stays a (quiet) NaN.
inline void store(bf16* p, f32x8 x) {
  u32x8 bits = (u32x8)x;
  u32x8 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  u32x8 is_nan = (u32x8)(x != x);
  rounded = (is_nan & ((bits >> 16) | 0x40)) | (~is_nan & rounded);
  u16x8 narrow = __builtin_convertvector(rounded, u16x8);
  std::memcpy(p, &narrow, sizeof narrow);
}

// The first `count` (1..8) elements at p; the other lanes are zero.
template <typename T>
inline f32x8 load(const T* p, int count) {
  if (count >= kLanes) return load(p);
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}

template <typename T>
inline void store(T* p, f32x8 x, int count) {
  if (count >= kLanes) return store(p, x);
  T lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, count * sizeof(T));
}

// x rounded to the storage type T.
template <typename T>
inline f32x8 rounded(f32x8 x) {
  T lanes[kLanes];
  store(lanes, x);
  return load(lanes);
}
template <>
inline f32x8 rounded<float>(f32x8 x) {
  return x;
}

inline float sum(f32x8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

// A sum of many vectors in float64 lanes, in their order. Float32 lanes would lose the small terms of a softmax beside
// the largest: 1e-5 of a log-prob over 50,000 tokens.
struct LongSum {
  f64x4 low = {}, high = {};

  void add(f32x8 x) {
    f32x4 halves[2];
    std::memcpy(halves, &x, sizeof x);
    low += __builtin_convertvector(halves[0], f64x4);
    high += __builtin_convertvector(halves[1], f64x4);
  }

  double value() const {
    f64x4 x = low + high;
    return (x[0] + x[2]) + (x[1] + x[3]);
  }

  // Natural logarithm of the sum, rounded once.
  float log() const { return static_cast<float>(std::log(value())); }
};

inline bool all(i32x8 mask) {
#if defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) == 0xFF;
#else
  bool found = true;
  for (int i = 0; i < kLanes; ++i) found = found && mask[i] != 0;
  return found;
#endif
}

inline float largest(f32x8 x) {
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// e^x = value 2^n. x = n ln2 + r, |r| <= ln2/2; value = e^r by a Chebyshev fit.
inline void split_exp(f32x8 x, f32x8& value, i32x8& n) {
  const f32x8 shift = splat(0x1.8p23f);  // adding it rounds to an integer, which is then in the low bits
  f32x8 shifted = fma(x, splat(0x1.715476p+0f), shift);
  n = (i32x8)shifted - (i32x8)shift;
  f32x8 count = shifted - shift;
  f32x8 r = fma(count, splat(-0x1.62e4p-1f), x);
  r = fma(count, splat(-0x1.7f7d1cp-20f), r);
  f32x8 q = splat(0x1.a124e4p-13f);
  q = fma(q, r, splat(0x1.6d4316p-10f));
  q = fma(q, r, splat(0x1.1110e0p-7f));
  q = fma(q, r, splat(0x1.5554eap-5f));
  q = fma(q, r, splat(0x1.555556p-3f));
  q = fma(q, r, splat(0.5f));
  value = fma(r * r, q, r) + 1.0f;
}

// e^x within 1 ulp. 2^n in two factors so that subnormal results and overflow to infinity are right. NaN in, NaN out.
inline f32x8 exp(f32x8 x) {
  x = select(x < -104.0f, splat(-104.0f), x);
  x = select(x > 89.0f, splat(89.0f), x);
  f32x8 value;
  i32x8 n;
  split_exp(x, value, n);
  i32x8 half = n >> 1;
  f32x8 low = (f32x8)((half + 127) << 23), high = (f32x8)((n - half + 127) << 23);
  return value * low * high;
}

// exp(x) for x <= 0, a term of a sum that is at least 1: below -87 it is e^-87, which adds nothing. NaN in, NaN out.
inline f32x8 exp_term(f32x8 x) {
  f32x8 value;
  i32x8 n;
  split_exp(max(splat(-87.0f), x), value, n);
  return value * (f32x8)((n + 127) << 23);
}

// log(1 + f) + e ln2 for f in [sqrt(1/2) - 1, sqrt(2) - 1]: f - f^2/2 + f^3 P(f).
inline f32x8 log_reduced(f32x8 f, f32x8 e) {
  f32x8 p = splat(0x1.1d8ea6p-4f);
  p = fma(p, f, splat(-0x1.d635bcp-4f));
  p = fma(p, f, splat(0x1.dea282p-4f));
  p = fma(p, f, splat(-0x1.fcf4c6p-4f));
  p = fma(p, f, splat(0x1.23d21ap-3f));
  p = fma(p, f, splat(-0x1.555b4ap-3f));
  p = fma(p, f, splat(0x1.999d5ap-3f));
  p = fma(p, f, splat(-0x1.fffffcp-3f));
  p = fma(p, f, splat(0x1.555554p-2f));
  f32x8 square = f * f;
  f32x8 tail = fma(square * f, p, e * 0x1.7f7d1cp-20f);
  tail = fma(square, splat(-0.5f), tail);
  return fma(e, splat(0x1.62e4p-1f), tail + f);
}

// x = m 2^e with m in [sqrt(1/2), sqrt(2)); x positive, normal and finite.
inline void split(f32x8 x, f32x8& m, i32x8& e) {
  const int32_t sqrt_half = 0x3F3504F3;
  e = ((i32x8)x - sqrt_half) >> 23;
  m = (f32x8)((i32x8)x - (e << 23));
}

// log(x) within 2 ulp for positive, normal, finite x.
inline f32x8 log(f32x8 x) {
  f32x8 m;
  i32x8 e;
  split(x, m, e);
  return log_reduced(m - 1.0f, __builtin_convertvector(e, f32x8));
}

// log(1 - v) within 2 ulp for v in (0, 1). Adds the rounding error of 1 - v back after the reduction.
inline f32x8 log1m(f32x8 v) {
  f32x8 u = 1.0f - v;
  f32x8 lost = (1.0f - u) - v;
  f32x8 m;
  i32x8 e;
  split(u, m, e);
  f32x8 scale = (f32x8)((127 - e) << 23);  // 2^-e
  return log_reduced(fma(lost, scale, m - 1.0f), __builtin_convertvector(e, f32x8));
}

}  // namespace paceline
