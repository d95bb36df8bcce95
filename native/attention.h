// Shared by the variants of the attention kernel: the places of keys and values.
#pragma once

#include <cstdint>

#include "vec.h"

namespace paceline {

constexpr int64_t kKeysTogether = 32;  // keys, or values, that all heads and rows take before the next ones

// The rows of a cache (or of the packed keys) that a query may see, in order of position. `runs`: each aligned group of
// eight rows is contiguous, so that one address serves for all.
struct Places {
  const int32_t* row;
  bool runs;
};

// The keys and values of one head.
template <typename T>
struct Keys {
  const T *k, *v;
  int64_t k_stride, v_stride, head_dim;
  Places places;
};

// Query rows of one request or packed segment, and what they see: all of them the first `shared` keys, and each row
// then the first own_count[row] of its own, which `own` has from row * own_stride on (stride 0: one list for all).
template <typename T>
struct Queries {
  const T* q;  // row r of head h, counted from those of the first key head: q + r * q_stride + h * head_dim
  int64_t q_stride, out_stride, rows, group;  // group: query heads per key head
  int64_t shared, most_own;                   // most_own: the largest of own_count
  const int32_t* own;
  int64_t own_stride;
  const int64_t* own_count;
};

namespace avx512 {

// Floats of scratch for so many queries (rows times query heads) that see at most `keys` keys.
int64_t scratch_floats(int64_t queries, int64_t keys, int64_t head_dim);

// Attends with the heads of `kv_heads` neighbouring key heads, the first of which `keys` has. Keys and values are read
// once for all rows and heads, as they lie in memory. next: the keys that this thread will need next, the first
// `next_keys` of which (at most kKeysTogether) are fetched meanwhile.
template <typename T>
void attend(const Queries<T>& queries, const Keys<T>& keys, int64_t kv_heads, float scale, const Keys<T>& next,
            int64_t next_keys, float* scratch, T* out);

}  // namespace avx512
}  // namespace paceline
