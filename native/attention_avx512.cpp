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

// Floats between the weights of two queries, and of the sums of one.
inline int64_t stride_of(int64_t keys) { return (keys + kWide - 1) / kWide * kWide + kWide; }
inline int64_t padded(int64_t head_dim) { return (head_dim + kWide * 2 - 1) / (kWide * 2) * (kWide * 2); }

template <int kNumber>
struct Blocks {
  static constexpr int kCount = kNumber;
};

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

// Rows to be fetched into the second-level cache while others are computed, one head after another as they lie in
// memory: the processor's own fetching then follows.
template <typename T>
struct Stream {
  const T* base;
  int64_t stride, n;  // between rows; rows left
  const int32_t* place;
  int64_t width, heads, head = 0;

  void fetch() {
    if (n <= 0) return;
    const char* at = reinterpret_cast<const char*>(base + *place * stride + head * width);
    for (int64_t byte = 0; byte < width * static_cast<int64_t>(sizeof(T)); byte += 64)
      _mm_prefetch(at + byte, _MM_HINT_T1);
    if (++head == heads) head = 0, ++place, --n;
  }
};

// out[g][j] = query g . key j for j < n; other lanes up to a multiple of 16 hold anything.
template <int kQueries, typename T>
void dots(const T* const* q, const T* keys, int64_t stride, const int32_t* place, int64_t n, int64_t width,
          Stream<T>* ahead, float* const* out) {
  constexpr int kKeys = kWide / kQueries;
  const int64_t whole = width / kStep<T> * kStep<T>;
  for (int64_t j = 0; j < n; j += kKeys) {
    const T* rows[kKeys];
    for (int i = 0; i < kKeys; ++i) {
      rows[i] = keys + place[j + i < n ? j + i : n - 1] * stride;
      if (ahead != nullptr) ahead->fetch();
    }
    __m512 sums[kWide];
#pragma GCC unroll 16
    for (int i = 0; i < kWide; ++i) sums[i] = _mm512_setzero_ps();
    auto step = [&](auto load) __attribute__((always_inline)) {
      __m512 part[kQueries];
#pragma GCC unroll 4
      for (int g = 0; g < kQueries; ++g) part[g] = load(q[g]);
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
    for (int g = 0; g < kQueries; ++g) __builtin_memcpy(out[g] + j, scores + g * kKeys, kKeys * sizeof(float));
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

// sums[g][0 : columns] += sum over j < n, rising, of weight[g][j] * value j, for columns <= 16 kBlocks. The sums are in
// the order of their registers.
template <int kQueries, int kBlocks, typename T>
void mix(const float* const* weight, const T* values, int64_t stride, const int32_t* place, int64_t n, int64_t columns,
         Stream<T>* ahead, float* const* sums) {
  using Columns = typename ColumnsOf<T>::Type;
  constexpr int kLoads = kBlocks / Columns::kVectors, kEach = Columns::kVectors;
  __m512 sum[kQueries][kBlocks];
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < kBlocks; ++c) sum[g][c] = _mm512_loadu_ps(sums[g] + c * kWide);
  for (int64_t j = 0; j < n; ++j) {
    const T* row = values + place[j] * stride;
    if (ahead != nullptr) ahead->fetch();
    __m512 value[kBlocks];
#pragma GCC unroll 4
    for (int c = 0; c < kLoads; ++c)
      Columns::load(row + c * Columns::kElements, columns - c * Columns::kElements, value + c * kEach);
#pragma GCC unroll 4
    for (int g = 0; g < kQueries; ++g) {
      __m512 each = _mm512_set1_ps(weight[g][j]);
#pragma GCC unroll 4
      for (int c = 0; c < kBlocks; ++c) sum[g][c] = _mm512_fmadd_ps(each, value[c], sum[g][c]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g)  // unrolled, or the sums would be in memory
#pragma GCC unroll 4
    for (int c = 0; c < kBlocks; ++c) _mm512_storeu_ps(sums[g] + c * kWide, sum[g][c]);
}

// Columns in pieces of 64, the rest in pieces of 32: (first column, columns) to run<kBlocks>.
template <typename Run>
inline void pieces(int64_t width, Run run) {
  int64_t at = 0;
  for (; width - at >= kColumns; at += kColumns) run(Blocks<4>{}, at, kColumns);
  for (; at < width; at += kColumns / 2) run(Blocks<2>{}, at, width - at);
}

// The queries of one key head: (number of them, first one) to run<kQueries>.
template <typename Run>
inline void batches(int64_t queries, Run run) {
  int64_t at = 0;
  for (; queries - at >= 4; at += 4) run(Blocks<4>{}, at);
  if (queries - at == 3) run(Blocks<3>{}, at);
  if (queries - at == 2) run(Blocks<2>{}, at);
  if (queries - at == 1) run(Blocks<1>{}, at);
}

// out[0 : width] = sums / total.
template <typename T>
void divide(const float* sums, float total, int64_t width, T* out) {
  using Columns = typename ColumnsOf<T>::Type;
  pieces(width, [&](auto blocks, int64_t first, int64_t columns) {
    constexpr int kLoads = decltype(blocks)::kCount / Columns::kVectors, kEach = Columns::kVectors;
    for (int c = 0; c < kLoads; ++c) {
      __m512 x[kEach];
      for (int i = 0; i < kEach; ++i)
        x[i] = _mm512_div_ps(_mm512_loadu_ps(sums + first + (c * kEach + i) * kWide), _mm512_set1_ps(total));
      Columns::store(out + first + c * Columns::kElements, columns - c * Columns::kElements, x);
    }
  });
}

}  // namespace

namespace avx512 {

int64_t scratch_floats(int64_t queries, int64_t keys, int64_t head_dim) {
  return queries * (stride_of(keys) + padded(head_dim) + 1);
}

template <typename T>
void attend(const Queries<T>& queries, const Keys<T>& keys, int64_t kv_heads, float scale, const Keys<T>& next,
            int64_t next_keys, float* scratch, T* out) {
  const int64_t width = keys.head_dim, shared = queries.shared, group = queries.group, each = queries.rows * group;
  const int64_t stride = stride_of(shared + queries.most_own), room = padded(width), all = kv_heads * each;
  float *weights = scratch, *sums = weights + all * stride, *totals = sums + all * room;
  const int32_t* place = keys.places.row;
  auto stream = [&](const T* base, int64_t between, const int32_t* from, int64_t n) {
    return Stream<T>{base, between, n < kKeysTogether ? n : kKeysTogether, from, width, kv_heads};
  };
  for (int64_t j = 0; j < shared; j += kKeysTogether) {
    const int64_t n = shared - j < kKeysTogether ? shared - j : kKeysTogether;
    Stream<T> ahead = j + n < shared ? stream(keys.k, keys.k_stride, place + j + n, shared - j - n)
                                     : stream(keys.v, keys.v_stride, place, shared);
    for (int64_t head = 0; head < kv_heads; ++head)
      batches(each, [&](auto batch, int64_t first) {
        constexpr int kQueries = decltype(batch)::kCount;
        const T* q[kQueries];
        float* scores[kQueries];
        for (int g = 0; g < kQueries; ++g) {
          const int64_t query = first + g;
          q[g] = queries.q + query / group * queries.q_stride + (head * group + query % group) * width;
          scores[g] = weights + (head * each + query) * stride + j;
        }
        dots<kQueries>(q, keys.k + head * width, keys.k_stride, place + j, n, width, first ? nullptr : &ahead, scores);
      });
  }
  for (int64_t head = 0; head < kv_heads; ++head)
    for (int64_t row = 0; row < queries.rows; ++row) {
      const int64_t own = queries.own_count[row], before = head * each + row * group;
      if (own)
        batches(group, [&](auto batch, int64_t first) {
          constexpr int kQueries = decltype(batch)::kCount;
          const T* q[kQueries];
          float* scores[kQueries];
          for (int g = 0; g < kQueries; ++g) {
            q[g] = queries.q + row * queries.q_stride + (head * group + first + g) * width;
            scores[g] = weights + (before + first + g) * stride + shared;
          }
          dots<kQueries, T>(q, keys.k + head * width, keys.k_stride, queries.own + row * queries.own_stride, own, width,
                            nullptr, scores);
        });
      for (int64_t query = before; query < before + group; ++query)
        totals[query] = softmax_weights(weights + query * stride, shared + own, scale);
    }
  for (int64_t i = 0; i < all * room; i += kWide) _mm512_storeu_ps(sums + i, _mm512_setzero_ps());
  auto add = [&](int64_t head, int64_t first_query, int64_t count, int64_t j, const int32_t* from, int64_t n,
                 Stream<T>* ahead) {
    batches(count, [&](auto batch, int64_t first) {
      constexpr int kQueries = decltype(batch)::kCount;
      pieces(width, [&](auto blocks, int64_t column, int64_t columns) {
        const float* weight[kQueries];
        float* into[kQueries];
        for (int g = 0; g < kQueries; ++g) {
          const int64_t query = head * each + first_query + first + g;
          weight[g] = weights + query * stride + j, into[g] = sums + query * room + column;
        }
        mix<kQueries, decltype(blocks)::kCount>(weight, keys.v + head * width + column, keys.v_stride, from, n, columns,
                                                first || column ? nullptr : ahead, into);
      });
    });
  };
  for (int64_t j = 0; j < shared; j += kKeysTogether) {
    const int64_t n = shared - j < kKeysTogether ? shared - j : kKeysTogether;
    Stream<T> ahead = j + n < shared ? stream(keys.v, keys.v_stride, place + j + n, shared - j - n)
                                     : stream(next.k, next.k_stride, next.places.row, next_keys);
    for (int64_t head = 0; head < kv_heads; ++head) add(head, 0, each, j, place + j, n, &ahead);
  }
  for (int64_t head = 0; head < kv_heads; ++head)
    for (int64_t row = 0; row < queries.rows; ++row) {
      if (const int64_t own = queries.own_count[row])
        add(head, row * group, group, shared, queries.own + row * queries.own_stride, own, nullptr);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t query = head * each + row * group + g;
        divide(sums + query * room, totals[query], width, out + row * queries.out_stride + (head * group + g) * width);
      }
    }
}

template void attend(const Queries<float>&, const Keys<float>&, int64_t, float, const Keys<float>&, int64_t, float*,
                     float*);
template void attend(const Queries<bf16>&, const Keys<bf16>&, int64_t, float, const Keys<bf16>&, int64_t, float*,
                     bf16*);

}  // namespace avx512
}  // namespace paceline
