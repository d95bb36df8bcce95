// The low-bit products for AVX-512 VNNI: four inputs of sixteen outputs per instruction.
//
// Compiled with AVX-512 flags: as in linear_avx512.cpp, nothing here may be a function that other files share.
#include "lanes512.h"
#include "low_bit.h"

namespace paceline {
namespace {

constexpr int kRows = 12;  // 12 x 2 vectors of sums leave 8 of the 32 registers for weights

// Four values of a row of x in every lane.
inline __m512i four_values(const int8_t* p) {
  int32_t all;
  __builtin_memcpy(&all, p, 4);
  return _mm512_set1_epi32(all);
}

// sums += kM rows of four values at x times kN vectors of weights. In assembler: the intrinsic's vectors have another
// type, so GCC 12 keeps up to half of the sums in memory, and the products of at least 9 rows take twice the time.
template <int kM, int kN>
PACELINE_INLINE void add_products(__m512i (&sums)[kM][kN], const __m512i (&weights)[kN], const int8_t* x,
                                  int64_t stride) {
#pragma GCC unroll 12
  for (int m = 0; m < kM; ++m) {
    const __m512i each = four_values(x + m * stride);
#pragma GCC unroll 4
    for (int c = 0; c < kN; ++c) asm("vpdpbusd %2, %1, %0" : "+v"(sums[m][c]) : "v"(weights[c]), "v"(each));
  }
}

// Inputs of a pass: kN panels `apart` bytes from each other, rows `stride` bytes from each other, and the bytes of the
// next panels, of which `rate` are fetched into the second-level cache per 64 bytes used of these.
struct Reading {
  const uint8_t* at;
  const int8_t* x;
  const char* next;
  int64_t apart, stride, rate;
};

// Exact sums of `steps` x 64 bytes of each panel; advances to the bytes behind them.
template <int kBits, int kM, int kN>
PACELINE_INLINE void sum_inputs(Reading& r, int64_t steps, __m512i (&sums)[kM][kN]) {
#pragma GCC unroll 12
  for (int m = 0; m < kM; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < kN; ++c) sums[m][c] = _mm512_setzero_si512();
  const __m512i low = _mm512_set1_epi8(15);
  const uint8_t* at = r.at;
  const int8_t* x = r.x;
  const char* next = r.next;
  for (int64_t s = 0; s < steps; ++s, at += 64, next += r.rate) {
    __m512i weights[kN];
#pragma GCC unroll 4
    for (int c = 0; c < kN; ++c) {
      _mm_prefetch(next + c * r.apart, _MM_HINT_T1);
      weights[c] = _mm512_loadu_si512(at + c * r.apart);
    }
    if constexpr (kBits == 8) {
      add_products<kM, kN>(sums, weights, x, r.stride);
      x += kQuad;
    } else {
      __m512i half[kN];
#pragma GCC unroll 4
      for (int c = 0; c < kN; ++c) half[c] = _mm512_and_si512(weights[c], low);
      add_products<kM, kN>(sums, half, x, r.stride);
#pragma GCC unroll 4
      for (int c = 0; c < kN; ++c) half[c] = _mm512_and_si512(_mm512_srli_epi16(weights[c], 4), low);
      add_products<kM, kN>(sums, half, x + kQuad, r.stride);
      x += 2 * kQuad;
    }
  }
  r.at = at, r.x = x, r.next = next;
}

// kM rows times kN panels from number `panel` on. Meanwhile, as in linear_avx512.cpp, fetches the `turn`-th of `turns`
// parts of the next kN panels into the second-level cache.
template <typename T, int kBits, int kM, int kN>
void block(const LowBitProduct<T>& p, int64_t row, int64_t panel, int64_t turn, int64_t turns) {
  const LowBitPanels& w = p.weight;
  const int64_t stride = padded_depth(w.depth), apart = w.bytes(), groups = kBits == 8 ? 1 : w.groups;
  const int64_t steps = w.value_bytes() / 64 / groups;
  const uint8_t* at = w.values(panel);
  const char* next = reinterpret_cast<const char*>(at + kN * apart) + turn * (w.value_bytes() / turns);
  Reading reading{at, p.x.values + row * stride, next, apart, stride, 64 / turns};
  alignas(64) float totals[kM][kN][kPanel];  // in memory: the registers are full of sums
  for (int64_t g = 0; g < groups; ++g) {
    __m512i sums[kM][kN];
    sum_inputs<kBits, kM, kN>(reading, steps, sums);
#pragma GCC unroll 4
    for (int c = 0; c < kN; ++c) {  // unrolled, or the sums would be in memory
      const __m512i zero = kBits == 8 ? _mm512_set1_epi32(kEightBitZero)
                                      : _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(
                                            w.zeros(panel + c) + g * kPanel)));
      const __m512 scale = _mm512_loadu_ps(w.scales(panel + c) + g * kPanel);
#pragma GCC unroll 12
      for (int m = 0; m < kM; ++m) {
        __m512i away = _mm512_mullo_epi32(zero, _mm512_set1_epi32(p.x.sums[(row + m) * groups + g]));
        __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[m][c], away));
        __m512 before = g == 0 ? _mm512_setzero_ps() : _mm512_load_ps(totals[m][c]);
        _mm512_store_ps(totals[m][c], _mm512_add_ps(before, _mm512_mul_ps(exact, scale)));
      }
    }
  }
  for (int c = 0; c < kN; ++c) {
    int64_t column = (panel + c) * kPanel;
    __mmask16 lanes = first_lanes(w.columns - column);
    __m512 bias = p.bias == nullptr ? _mm512_setzero_ps() : widened(p.bias + column, lanes);
    for (int m = 0; m < kM; ++m) {
      __m512 value = _mm512_mul_ps(_mm512_load_ps(totals[m][c]), _mm512_set1_ps(p.x.scales[row + m]));
      if (p.bias != nullptr) value = _mm512_add_ps(value, bias);
      store_rounded(p.out + (row + m) * w.columns + column, value, lanes);
    }
  }
}

// `rows` <= kRows rows times kN panels.
template <typename T, int kBits, int kN>
void rows_of(const LowBitProduct<T>& p, int64_t row, int64_t rows, int64_t panel, int64_t turn, int64_t turns) {
  switch (rows) {
    case 1: return block<T, kBits, 1, kN>(p, row, panel, turn, turns);
    case 2: return block<T, kBits, 2, kN>(p, row, panel, turn, turns);
    case 3: return block<T, kBits, 3, kN>(p, row, panel, turn, turns);
    case 4: return block<T, kBits, 4, kN>(p, row, panel, turn, turns);
    case 5: return block<T, kBits, 5, kN>(p, row, panel, turn, turns);
    case 6: return block<T, kBits, 6, kN>(p, row, panel, turn, turns);
  }
  if constexpr (kN < 4) switch (rows) {
    case 7: return block<T, kBits, 7, kN>(p, row, panel, turn, turns);
    case 8: return block<T, kBits, 8, kN>(p, row, panel, turn, turns);
    case 9: return block<T, kBits, 9, kN>(p, row, panel, turn, turns);
    case 10: return block<T, kBits, 10, kN>(p, row, panel, turn, turns);
    case 11: return block<T, kBits, 11, kN>(p, row, panel, turn, turns);
    case 12: return block<T, kBits, 12, kN>(p, row, panel, turn, turns);
  }
}

template <typename T, int kBits, int kN>
int64_t panels_of(const LowBitProduct<T>& p, int64_t row, int64_t rows, int64_t first, int64_t last) {
  const int64_t turns = (rows + kRows - 1) / kRows;
  for (; first + kN <= last; first += kN)
    for (int64_t turn = 0, at = 0; turn < turns; ++turn) {  // blocks of nearly the same height
      int64_t count = (rows - at + turns - turn - 1) / (turns - turn);
      rows_of<T, kBits, kN>(p, row + at, count, first, turn, turns);
      at += count;
    }
  return first;
}

template <typename T, int kBits>
void multiply_bits(const LowBitProduct<T>& p, int64_t row, int64_t rows, int64_t first, int64_t last) {
  if (rows <= 6) first = panels_of<T, kBits, 4>(p, row, rows, first, last);
  first = panels_of<T, kBits, 2>(p, row, rows, first, last);
  panels_of<T, kBits, 1>(p, row, rows, first, last);
}

}  // namespace

namespace avx512 {

template <typename T>
void multiply(const LowBitProduct<T>& p, int64_t row, int64_t rows, int64_t first, int64_t last) {
  if (p.weight.bits == 8) return multiply_bits<T, 8>(p, row, rows, first, last);
  multiply_bits<T, 4>(p, row, rows, first, last);
}

template void multiply(const LowBitProduct<float>&, int64_t, int64_t, int64_t, int64_t);
template void multiply(const LowBitProduct<bf16>&, int64_t, int64_t, int64_t, int64_t);

}  // namespace avx512
}  // namespace paceline
