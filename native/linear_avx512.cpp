// The matrix kernel for AVX-512. Invariant as in linear.cpp: every element is one chain, k rising. Float32: fused
// multiply-adds. Bfloat16: dot products of two (products exact, sums in float32, subnormals taken as zero).
//
// Compiled with AVX-512 flags: nothing here may be a function that other files share, or the linker could keep this
// copy of it for CPUs that cannot run it. So no standard library, and everything local.
#include "lanes512.h"
#include "linear.h"

namespace paceline {
namespace {

constexpr int kRows = 12;  // 12 x 2 vectors of sums leave 8 of the 32 registers for weights

inline __m512 multiply_add(__m512 x, __m512 w, __m512 sum, float) { return _mm512_fmadd_ps(x, w, sum); }
inline __m512 multiply_add(__m512 x, __m512 w, __m512 sum, bf16) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}

inline void store_lanes(bf16* p, __m512 x, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(p, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}

// Four bytes of a row of x in every lane: one float, or two bfloat16 (the second zero past the depth).
inline __m512 four_bytes(const void* p) {
  float value;
  __builtin_memcpy(&value, p, 4);
  return _mm512_set1_ps(value);
}
inline __m512 two_bytes(const bf16* p) { return (__m512)_mm512_set1_epi32(p->bits); }
inline __m512 two_bytes(const float*) { return _mm512_setzero_ps(); }

// kM rows times kN panels from number `panel` on. Meanwhile fetches the `turn`-th of `turns` parts of the next kN
// panels into the second-level cache: the blocks that share these panels fetch the next ones together.
template <typename T, int kM, int kN>
void block(const Product<T, T>& p, int64_t row, int64_t panel, int64_t turn, int64_t turns) {
  constexpr int64_t kStep = kPanel * kDeep<T>;
  const int64_t apart = panel_size(p.depth), steps = p.depth / kDeep<T>, stride = p.stride;
  __m512 sums[kM][kN];
#pragma GCC unroll 12
  for (int m = 0; m < kM; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < kN; ++c) sums[m][c] = _mm512_setzero_ps();
  const T *x = p.x + row * stride, *w = p.panel(panel);
  const char* next = reinterpret_cast<const char*>(w + kN * apart) + turn * (steps * 64 / turns);
  const int64_t rate = 64 / turns;  // bytes to fetch of each next panel per 64 bytes used of this one
  auto step = [&](auto value) __attribute__((always_inline)) {
    __m512 weights[kN];
#pragma GCC unroll 4
    for (int c = 0; c < kN; ++c) weights[c] = _mm512_loadu_ps(w + c * apart);
#pragma GCC unroll 12
    for (int m = 0; m < kM; ++m) {
      __m512 each = value(x + m * stride);
#pragma GCC unroll 4
      for (int c = 0; c < kN; ++c) sums[m][c] = multiply_add(each, weights[c], sums[m][c], T{});
    }
  };
  for (int64_t s = 0; s < steps; ++s, x += kDeep<T>, w += kStep, next += rate) {
#pragma GCC unroll 4
    for (int c = 0; c < kN; ++c) _mm_prefetch(next + c * apart * sizeof(T), _MM_HINT_T1);
    step([](const T* at) __attribute__((always_inline)) { return four_bytes(at); });
  }
  if (p.depth % kDeep<T>) step([](const T* at) __attribute__((always_inline)) { return two_bytes(at); });
#pragma GCC unroll 4
  for (int c = 0; c < kN; ++c) {  // unrolled, or the sums would be in memory
    int64_t column = (panel + c) * kPanel;
    __mmask16 lanes = first_lanes(p.columns - column);
    __m512 bias = p.bias == nullptr ? _mm512_setzero_ps() : widened(p.bias + column, lanes);
#pragma GCC unroll 12
    for (int m = 0; m < kM; ++m) {
      __m512 value = p.bias == nullptr ? sums[m][c] : _mm512_add_ps(sums[m][c], bias);
      store_lanes(p.out + (row + m) * p.columns + column, value, lanes);
    }
  }
}

// `rows` <= kRows rows times kN panels.
template <typename T, int kN>
void rows_of(const Product<T, T>& p, int64_t row, int64_t rows, int64_t panel, int64_t turn, int64_t turns) {
  switch (rows) {
    case 1: return block<T, 1, kN>(p, row, panel, turn, turns);
    case 2: return block<T, 2, kN>(p, row, panel, turn, turns);
    case 3: return block<T, 3, kN>(p, row, panel, turn, turns);
    case 4: return block<T, 4, kN>(p, row, panel, turn, turns);
    case 5: return block<T, 5, kN>(p, row, panel, turn, turns);
    case 6: return block<T, 6, kN>(p, row, panel, turn, turns);
  }
  if constexpr (kN < 4) switch (rows) {
    case 7: return block<T, 7, kN>(p, row, panel, turn, turns);
    case 8: return block<T, 8, kN>(p, row, panel, turn, turns);
    case 9: return block<T, 9, kN>(p, row, panel, turn, turns);
    case 10: return block<T, 10, kN>(p, row, panel, turn, turns);
    case 11: return block<T, 11, kN>(p, row, panel, turn, turns);
    case 12: return block<T, 12, kN>(p, row, panel, turn, turns);
  }
}

template <typename T, int kN>
int64_t panels_of(const Product<T, T>& p, int64_t row, int64_t rows, int64_t first, int64_t last) {
  const int64_t turns = (rows + kRows - 1) / kRows;
  for (; first + kN <= last; first += kN)
    for (int64_t turn = 0, at = 0; turn < turns; ++turn) {  // blocks of nearly the same height
      int64_t count = (rows - at + turns - turn - 1) / (turns - turn);
      rows_of<T, kN>(p, row + at, count, first, turn, turns);
      at += count;
    }
  return first;
}

}  // namespace

namespace avx512 {

template <typename T>
void multiply(const Product<T, T>& p, int64_t row, int64_t rows, int64_t first, int64_t last) {
  if (rows <= 6) first = panels_of<T, 4>(p, row, rows, first, last);
  first = panels_of<T, 2>(p, row, rows, first, last);
  panels_of<T, 1>(p, row, rows, first, last);
}

template void multiply(const Product<float, float>&, int64_t, int64_t, int64_t, int64_t);
template void multiply(const Product<bf16, bf16>&, int64_t, int64_t, int64_t, int64_t);

}  // namespace avx512
}  // namespace paceline
