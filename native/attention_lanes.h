// Dot products, softmax weights and weighted sums of one query over its keys, in vectors of eight lanes: what the
// attention of CPUs without AVX-512 and every backward have in common.
#pragma once

#include <algorithm>
#include <limits>

#include "attention.h"
#include "kernels.h"

namespace paceline {
namespace {

// Addresses of rows j .. j + 7 below n; past n, the last one is repeated.
template <typename T>
void addresses(const Places& places, const T* base, int64_t stride, int64_t j, int64_t n, const T* out[kLanes]) {
  if (places.runs && j + kLanes <= n) {
    const T* first = base + places.row[j] * stride;
    for (int lane = 0; lane < kLanes; ++lane) out[lane] = first + lane * stride;
  } else {
    for (int64_t lane = 0; lane < kLanes; ++lane) out[lane] = base + places.row[std::min(j + lane, n - 1)] * stride;
  }
}

// Adds neighbouring lanes of a and b, in the layout of AVX hadd.
inline f32x8 add_pairs(f32x8 a, f32x8 b) {
  return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

// The sums of eight vectors, as one vector.
inline f32x8 sum_each(const f32x8 x[kLanes]) {
  f32x8 low = add_pairs(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
  f32x8 high = add_pairs(add_pairs(x[4], x[5]), add_pairs(x[6], x[7]));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

// out[j] = query . row j for j < n, eight at a time.
template <typename T, typename Q>
void dots(const Q* query, const T* base, int64_t stride, const Places& places, int64_t n, int64_t head_dim,
          float* out) {
  for (int64_t j = 0; j < n; j += kLanes) {
    const T* rows[kLanes];
    addresses(places, base, stride, j, n, rows);
    f32x8 sums[kLanes] = {};
    for (int64_t at = 0; at < head_dim; at += kLanes) {
      f32x8 part = load(query + at);
#pragma GCC unroll 8
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] = fma(part, load(rows[lane] + at), sums[lane]);
    }
    store(out + j, sum_each(sums));
  }
}

// out[0 : 8 * kVectors] = sum over j < n of weight[j] * row j; even and odd j have separate sums.
template <int kVectors, typename T>
void weighted_columns(const float* weight, const T* base, int64_t stride, const Places& places, int64_t n,
                      float* out) {
  f32x8 sums[2][kVectors] = {};
  auto add = [&](const T* row, int64_t j, f32x8* into) {
    f32x8 each = splat(weight[j]);
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) into[c] = fma(each, load(row + c * kLanes), into[c]);
  };
  for (int64_t j = 0; j < n; j += kLanes) {
    const T* rows[kLanes];
    addresses(places, base, stride, j, n, rows);
    if (j + kLanes <= n) {
#pragma GCC unroll 8
      for (int lane = 0; lane < kLanes; ++lane) add(rows[lane], j + lane, sums[lane & 1]);
    } else {
      for (int64_t lane = 0; j + lane < n; ++lane) add(rows[lane], j + lane, sums[lane & 1]);
    }
  }
  for (int c = 0; c < kVectors; ++c) store(out + c * kLanes, sums[0][c] + sums[1][c]);
}

template <typename T>
void weighted_sum(const float* weight, const T* base, int64_t stride, const Places& places, int64_t n,
                  int64_t head_dim, float* out) {
  int64_t at = 0;
  for (; at + 4 * kLanes <= head_dim; at += 4 * kLanes)
    weighted_columns<4>(weight, base + at, stride, places, n, out + at);
  for (; at < head_dim; at += kLanes) weighted_columns<1>(weight, base + at, stride, places, n, out + at);
}

// weight[j] = exp(scale q.k_j - max), zero in the lanes past n; returns their sum.
template <typename T>
float softmax_weights(const T* query, const Keys<T>& keys, int64_t n, float scale, float* weight) {
  dots(query, keys.k, keys.k_stride, keys.places, n, keys.head_dim, weight);
  const f32x8 minus_infinity = splat(-std::numeric_limits<float>::infinity());
  f32x8 best = minus_infinity;
  int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t j = n; j < padded; ++j) weight[j] = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < padded; j += kLanes) {
    f32x8 score = load(weight + j) * scale;
    store(weight + j, score);
    best = max(score, best);
  }
  float top = largest(best);
  f32x8 total = {};
  for (int64_t j = 0; j < padded; j += kLanes) {
    f32x8 e = exp(load(weight + j) - top);
    store(weight + j, e);
    total += e;
  }
  return sum(total);
}

}  // namespace
}  // namespace paceline
