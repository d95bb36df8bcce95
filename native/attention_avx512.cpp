// Attention of query rows over their keys for AVX-512. Same invariant as attention.cpp: one row and head depends only
// on its query and its list of keys and values. Each sum has one order, however many heads are computed together.
//
// Compiled with AVX-512 flags, so everything here is local, without the standard library: see linear_avx512.cpp.
#include "attention.h"
#include "lanes512.h"

namespace paceline {
namespace {

constexpr int kWide = 16;     // lanes of a float32 vector
constexpr int kColumns = 64;  // columns of the output summed at a time

// Elements of a key per register: a step of a dot product.
template <typename T>
constexpr int64_t kStep = 64 / sizeof(T);

inline __m512 load_step(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
inline __m512 load_step(const bf16* p, int64_t count) {
  return (__m512)_mm512_maskz_loadu_epi16(first_halves(count), p);
}
template <typename T>
inline __m512 load_step(const T* p) {
  return _mm512_loadu_ps(p);
}

// Products of bfloat16 are exact; two enter a float32 sum at a time.
inline __m512 dot_step(__m512 a, __m512 b, __m512 sum, float) { return _mm512_fmadd_ps(a, b, sum); }
inline __m512 dot_step(__m512 a, __m512 b, __m512 sum, bf16) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Lane i: the sum of x[i], in the same order for every i.
inline __m512 sum_each(const __m512 x[kWide]) {
  __m512 pairs[8], quads[4], halves[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
    quads[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                       _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
}

inline void fetch(const void* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(static_cast<const char*>(row) + at, _MM_HINT_T1);
}

// out[g * stride + j] = query g . key j for j < n; other lanes up to a multiple of 16 hold anything.
template <int kQueries, typename T>
void dots(const T* q, const Keys<T>& keys, int64_t n, const Ahead<T>& ahead, float* out,
          int64_t out_stride) {
  constexpr int kKeys = kWide / kQueries;
  const int64_t width = keys.head_dim, bytes = width * sizeof(T), whole = width / kStep<T> * kStep<T>;
  const int32_t* place = keys.places.row;
  for (int64_t j = 0; j < n; j += kKeys) {
    const T* rows[kKeys];
    for (int i = 0; i < kKeys; ++i) {
      int64_t at = j + i < n ? j + i : n - 1;
      rows[i] = keys.k + place[at] * keys.k_stride;
      if (at < ahead.n) fetch(ahead.k + ahead.row[at] * keys.k_stride, bytes);
    }
    __m512 sums[kWide];
#pragma GCC unroll 16
    for (int i = 0; i < kWide; ++i) sums[i] = _mm512_setzero_ps();
    auto step = [&](auto load) __attribute__((always_inline)) {
      __m512 part[kQueries];
#pragma GCC unroll 4
      for (int g = 0; g < kQueries; ++g) part[g] = load(q + g * width);
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        __m512 key = load(rows[i]);
#pragma GCC unroll 4
        for (int g = 0; g < kQueries; ++g) sums[g * kKeys + i] = dot_step(part[g], key, sums[g * kKeys + i], T{});
      }
    };
    int64_t at = 0;
    for (; at < whole; at += kStep<T>)
      step([at](const T* row) __attribute__((always_inline)) { return load_step(row + at); });
    if (at < width)
      step([at, width](const T* row) __attribute__((always_inline)) { return load_step(row + at, width - at); });
    float scores[kWide];
    _mm512_storeu_ps(scores, sum_each(sums));
    for (int g = 0; g < kQueries; ++g)
      __builtin_memcpy(out + g * out_stride + j, scores + g * kKeys, kKeys * sizeof(float));
  }
}

// e^x for x <= 0, within 1 ulp; 0 from -104 down. x = n ln2 + r as in vec.h; one instruction applies 2^n.
inline __m512 exp_negative(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // a NaN stays one
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)), 0);
  __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0x1.62e4p-1f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0x1.7f7d1cp-20f), r);
  __m512 q = _mm512_set1_ps(0x1.a124e4p-13f);
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.6d4316p-10f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.1110e0p-7f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.5554eap-5f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.555556p-3f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.5f));
  __m512 value = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(r, r), q, r), _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(value, n);
}

// weight[j] = exp(scale weight[j] - max) for j < n, zero in the lanes past n; returns their sum.
inline float softmax_weights(float* weight, int64_t n, float scale) {
  const __m512 minus_infinity = _mm512_set1_ps(-__builtin_inff());
  __m512 best = minus_infinity, total = _mm512_setzero_ps();
  for (int64_t j = 0; j < n; j += kWide) {
    __m512 score = _mm512_mul_ps(_mm512_loadu_ps(weight + j), _mm512_set1_ps(scale));
    score = _mm512_mask_mov_ps(minus_infinity, first_lanes(n - j), score);
    _mm512_storeu_ps(weight + j, score);
    best = _mm512_max_ps(score, best);
  }
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(best));
  for (int64_t j = 0; j < n; j += kWide) {
    __m512 e = exp_negative(_mm512_sub_ps(_mm512_loadu_ps(weight + j), top));
    _mm512_storeu_ps(weight + j, e);
    total = _mm512_add_ps(total, e);
  }
  return _mm512_reduce_add_ps(total);
}

// Sixteen columns of values as float32, in order. Columns of bfloat16 come as the even and the odd ones of 32.
struct FloatColumns {
  static constexpr int kElements = 16, kVectors = 1;
  static void load(const float* p, int64_t count, __m512 out[1]) { out[0] = load_step(p, count); }
  static void store(float* p, int64_t count, const __m512 x[1]) { _mm512_mask_storeu_ps(p, first_lanes(count), x[0]); }
};
struct Bf16Columns {
  static constexpr int kElements = 32, kVectors = 2;
  static void load(const bf16* p, int64_t count, __m512 out[2]) {
    __m512i pairs = (__m512i)load_step(p, count);
    out[0] = (__m512)_mm512_slli_epi32(pairs, 16);
    out[1] = (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
  }
  static void store(bf16* p, int64_t count, const __m512 x[2]) {
    __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x[0]));
    __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x[1]));
    _mm512_mask_storeu_epi16(p, first_halves(count), _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
  }
};
template <typename T>
struct ColumnsOf {
  using Type = FloatColumns;
};
template <>
struct ColumnsOf<bf16> {
  using Type = Bf16Columns;
};

// out[g][0 : columns] = sum over j < n, rising, of weight[g][j] * value j / total[g], for columns <= 16 kBlocks.
template <int kQueries, int kBlocks, typename T>
void mix(const float* weight, int64_t weight_stride, const float* total, const T* values, const Keys<T>& keys,
         int64_t n, int64_t columns, const Ahead<T>& ahead, T* out) {
  using Columns = typename ColumnsOf<T>::Type;
  constexpr int kLoads = kBlocks / Columns::kVectors, kEach = Columns::kVectors;
  __m512 sums[kQueries][kBlocks];
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < kBlocks; ++c) sums[g][c] = _mm512_setzero_ps();
  for (int64_t j = 0; j < n; ++j) {
    const T* row = values + keys.places.row[j] * keys.v_stride;
    if (j < ahead.n) fetch(ahead.v + ahead.row[j] * keys.v_stride, columns * sizeof(T));
    __m512 value[kBlocks];
#pragma GCC unroll 4
    for (int c = 0; c < kLoads; ++c)
      Columns::load(row + c * Columns::kElements, columns - c * Columns::kElements, value + c * kEach);
#pragma GCC unroll 4
    for (int g = 0; g < kQueries; ++g) {
      __m512 each = _mm512_set1_ps(weight[g * weight_stride + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kBlocks; ++c) sums[g][c] = _mm512_fmadd_ps(each, value[c], sums[g][c]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g) {  // unrolled, or the sums would be in memory
#pragma GCC unroll 4
    for (int c = 0; c < kBlocks; ++c) sums[g][c] = _mm512_div_ps(sums[g][c], _mm512_set1_ps(total[g]));
#pragma GCC unroll 4
    for (int c = 0; c < kLoads; ++c)
      Columns::store(out + g * keys.head_dim + c * Columns::kElements, columns - c * Columns::kElements,
                     sums[g] + c * kEach);
  }
}

template <int kQueries, typename T>
void attend_queries(const T* q, const Keys<T>& keys, int64_t n, float scale, Ahead<T> ahead, float* weight, T* out) {
  const int64_t stride = (n + kWide - 1) / kWide * kWide + kWide, width = keys.head_dim;
  float total[kQueries];
  dots<kQueries>(q, keys, n, ahead, weight, stride);
  for (int g = 0; g < kQueries; ++g) total[g] = softmax_weights(weight + g * stride, n, scale);
  const T* values = keys.v;
  int64_t left = width;
  for (; left >= kColumns; left -= kColumns, values += kColumns, ahead.v += kColumns, out += kColumns)
    mix<kQueries, 4>(weight, stride, total, values, keys, n, kColumns, ahead, out);
  for (; left > 0; left -= kColumns / 2, values += kColumns / 2, ahead.v += kColumns / 2, out += kColumns / 2)
    mix<kQueries, 2>(weight, stride, total, values, keys, n, left, ahead, out);
}

}  // namespace

namespace avx512 {

template <typename T>
void attend(const T* q, int64_t queries, const Keys<T>& keys, int64_t n, float scale, Ahead<T> ahead, float* weight,
            T* out) {
  const int64_t width = keys.head_dim;
  for (; queries >= 4; queries -= 4, q += 4 * width, out += 4 * width, ahead.n = 0)
    attend_queries<4>(q, keys, n, scale, ahead, weight, out);
  if (queries >= 2) {
    attend_queries<2>(q, keys, n, scale, ahead, weight, out);
    queries -= 2, q += 2 * width, out += 2 * width, ahead.n = 0;
  }
  if (queries) attend_queries<1>(q, keys, n, scale, ahead, weight, out);
}

template void attend(const float*, int64_t, const Keys<float>&, int64_t, float, Ahead<float>, float*, float*);
template void attend(const bf16*, int64_t, const Keys<bf16>&, int64_t, float, Ahead<bf16>, float*, bf16*);

}  // namespace avx512
}  // namespace paceline
