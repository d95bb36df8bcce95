// The bfloat16 matrix kernel for AMX. Invariant as in linear.cpp, in the order of TDPBF16PS. It takes 32 k at a time:
// the even and the odd k are each a chain of fused multiply-adds from zero, and their sum is added to the element's.
// Products are exact, subnormals taken as zero. Every number of rows goes through tiles, as no other instruction sums
// in this order.
//
// Compiled with AMX flags, so everything here is local, without the standard library: see linear_avx512.cpp.
#include "lanes512.h"
#include "tiles.h"

namespace paceline {
namespace {

constexpr int64_t kTile = kTileBytes / sizeof(bf16);  // elements

// Sums of one panel, or of two side by side, plus bias, rounded.
template <int kN>
void finish(const TileProduct& p, const float (*sums)[kTileRows * kPanel], int64_t row, int64_t rows, int64_t panel) {
  const int64_t column = panel * kPanel;
  const __mmask32 lanes = first_halves(p.columns - column);
  __m512 bias[kN];
  for (int n = 0; n < kN; ++n)
    bias[n] = p.bias == nullptr ? _mm512_setzero_ps() : widened(p.bias + column + n * kPanel, lanes >> (n * kPanel));
  bf16* out = p.out + row * p.columns + column;
  for (int64_t m = 0; m < rows; ++m, out += p.columns) {
    __m512 value[kN];
    for (int n = 0; n < kN; ++n) {
      value[n] = _mm512_load_ps(sums[n] + m * kPanel);
      if (p.bias != nullptr) value[n] = _mm512_add_ps(value[n], bias[n]);
    }
    if constexpr (kN == 1)
      _mm256_mask_storeu_epi16(out, lanes, (__m256i)_mm512_cvtneps_pbh(value[0]));
    else
      _mm512_mask_storeu_epi16(out, lanes, (__m512i)_mm512_cvtne2ps_pbh(value[1], value[0]));
  }
}

// Weights are streamed, so that x stays in the first-level cache. Meanwhile the next panels are fetched into the
// second, one tile between two loads: more requests than fill buffers would delay the loads.
template <int kM, int kN>
void block(const TileProduct& p, int64_t row, int64_t rows, int64_t panel) {
  const int64_t apart = panel_size(p.depth), steps = apart / kTile;
  const bf16 *x = p.x + row / kTileRows * apart, *w = p.panels + panel * apart;
  unrolled<kM * kN>([](auto i) __attribute__((always_inline)) {
    clear_tile<sums_tile<kM>(decltype(i)::value / kN, decltype(i)::value % kN)>();
  });
  for (int64_t s = 0; s < steps; ++s, x += kTile, w += kTile) {
    unrolled<kN>([&](auto n) __attribute__((always_inline)) {
      constexpr int kColumn = decltype(n)::value, kWeights = weight_tile<kM>(kColumn);
      const char* next = reinterpret_cast<const char*>(w + (kN + kColumn) * apart);
#pragma GCC unroll 16
      for (int at = 0; at < kTileBytes; at += kTileRowBytes) _mm_prefetch(next + at, _MM_HINT_T1);
      stream_tile<kWeights>(w + kColumn * apart);
      unrolled<kM>([&](auto m) __attribute__((always_inline)) {
        constexpr int kRow = decltype(m)::value;
        if constexpr (kColumn == 0) load_tile<4 + kRow>(x + kRow * apart);
        add_products_bf16<sums_tile<kM>(kRow, kColumn), 4 + kRow, kWeights>();
      });
    });
  }
  alignas(64) float sums[kM * kN][kTileRows * kPanel];
  unrolled<kM * kN>([&](auto i) __attribute__((always_inline)) {
    store_tile<sums_tile<kM>(decltype(i)::value / kN, decltype(i)::value % kN)>(sums[decltype(i)::value]);
  });
  constexpr int kPair = kN == 1 ? 1 : 2;
  for (int64_t m = 0; m < kM; ++m) {
    const int64_t at = m * kTileRows, count = rows - at < kTileRows ? rows - at : kTileRows;
    for (int64_t n = 0; n < kN; n += kPair) finish<kPair>(p, sums + m * kN + n, row + at, count, panel + n);
  }
}

template <int kM>
void rows_of(const TileProduct& p, int64_t row, int64_t rows, int64_t first, int64_t last) {
  constexpr int kN = 4 / kM;
  for (; first + kN <= last; first += kN) block<kM, kN>(p, row, rows, first);
  if constexpr (kN > 2)
    for (; first + 2 <= last; first += 2) block<kM, 2>(p, row, rows, first);
  for (; first < last; ++first) block<kM, 1>(p, row, rows, first);
}

}  // namespace

namespace amx {

void multiply(const TileProduct& p, int64_t row, int64_t rows, int64_t first, int64_t last) {
  constexpr uint8_t kAll = kTileRows;
  if (rows <= kTileRows) {
    const uint8_t some = static_cast<uint8_t>(rows);
    Tiles tiles({some, some, some, some, some, kAll, kAll, kAll});
    return rows_of<1>(p, row, rows, first, last);
  }
  // One configuration: beyond 32 rows the last block may compute rows past the end, and does not store them.
  const uint8_t rest = static_cast<uint8_t>(rows < 2 * kTileRows ? rows - kTileRows : kTileRows);
  Tiles tiles({kAll, kAll, rest, rest, kAll, rest, kAll, kAll});
  for (int64_t at = 0; at < rows; at += 2 * kTileRows) {
    const int64_t count = rows - at < 2 * kTileRows ? rows - at : 2 * kTileRows;
    if (count <= kTileRows)
      rows_of<1>(p, row + at, count, first, last);
    else
      rows_of<2>(p, row + at, count, first, last);
  }
}

}  // namespace amx
}  // namespace paceline
