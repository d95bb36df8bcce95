// Shared by the variants of the attention kernel: the places of keys and values.
#pragma once

#include <cstdint>

#include "vec.h"

namespace paceline {

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

// The first n keys of the next task, to be fetched into the second-level cache meanwhile.
template <typename T>
struct Ahead {
  const T *k, *v;
  const int32_t* row;
  int64_t n;
};

namespace avx512 {

// Attends with the query rows of one token, q [queries, head_dim], to their first n keys -> out [queries, head_dim].
// weight: 4 (n + 32) floats of scratch.
template <typename T>
void attend(const T* q, int64_t queries, const Keys<T>& keys, int64_t n, float scale, Ahead<T> ahead, float* weight,
            T* out);

}  // namespace avx512
}  // namespace paceline
