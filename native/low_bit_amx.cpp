// The low-bit products for AMX: 64 inputs of 16 rows and 16 outputs per instruction. Bitwise equal to the other
// variants: the sums of a group are exact, and the float32 operations after them are the same.
//
// Compiled with AMX flags, so everything here is local, without the standard library: see linear_avx512.cpp.
#include "lanes512.h"
#include "low_bit.h"
#include "tiles.h"

namespace paceline {
namespace {

constexpr int64_t kSums = kTileRows * kPanel;  // of a tile

// Values of 4 bits of a panel minus their zero points: [padded depth / 4][16][4] signed bytes.
void unpack(const LowBitPanels& w, int64_t panel, uint8_t* out) {
  const __m512i low = _mm512_set1_epi8(15), each = _mm512_set1_epi32(0x01010101);
  const uint8_t* at = w.values(panel);
  for (int64_t g = 0; g < w.groups; ++g) {
    const __m128i zeros = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w.zeros(panel) + g * kPanel));
    const __m512i zero = _mm512_mullo_epi32(_mm512_cvtepu8_epi32(zeros), each);
    for (int64_t k = 0; k < w.group_depth(); k += 2 * kQuad, at += 64, out += 128) {
      const __m512i both = _mm512_loadu_si512(at);
      _mm512_store_si512(out, _mm512_sub_epi8(_mm512_and_si512(both, low), zero));
      _mm512_store_si512(out + 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), low), zero));
    }
  }
}

// Values of panels in the layout of tiles, `apart` bytes from one to the next.
struct TilePanels {
  const uint8_t* first;
  int64_t apart;
};

template <typename T, int kBits, int kM, int kN>
void block(const LowBitProduct<T>& p, int64_t row, int64_t rows, int64_t panel, const TilePanels& panels) {
  const LowBitPanels& w = p.weight;
  const int64_t stride = padded_depth(w.depth), groups = kBits == 8 ? 1 : w.groups;
  const int64_t steps = stride / kTileDepth / groups;
  const int8_t* x = p.x.values + row * stride;
  const uint8_t* at = panels.first;
  alignas(64) int32_t sums[kM * kN][kSums];
  alignas(64) float totals[kM * kN][kSums];
  for (int64_t g = 0; g < groups; ++g) {
    unrolled<kM * kN>([](auto i) __attribute__((always_inline)) {
      clear_tile<sums_tile<kM>(decltype(i)::value / kN, decltype(i)::value % kN)>();
    });
    for (int64_t s = 0; s < steps; ++s, x += kTileDepth, at += kTileBytes) {
      if constexpr (kBits == 8) {
        for (int64_t line = 0; line < kTileBytes; line += kTileRowBytes)
          unrolled<kN>([&](auto n) __attribute__((always_inline)) {
            _mm_prefetch(at + (kN + decltype(n)::value) * panels.apart + line, _MM_HINT_T1);
          });
      }
      unrolled<kN>([&](auto n) __attribute__((always_inline)) {
        constexpr int kColumn = decltype(n)::value, kWeights = weight_tile<kM>(kColumn);
        load_tile<kWeights>(at + kColumn * panels.apart);
        unrolled<kM>([&](auto m) __attribute__((always_inline)) {
          constexpr int kRow = decltype(m)::value;
          if constexpr (kColumn == 0) load_tile<4 + kRow>(x + kRow * kTileRows * stride, stride);
          if constexpr (kBits == 8)
            add_products_unsigned<sums_tile<kM>(kRow, kColumn), 4 + kRow, kWeights>();
          else
            add_products_signed<sums_tile<kM>(kRow, kColumn), 4 + kRow, kWeights>();
        });
      });
    }
    unrolled<kM * kN>([&](auto i) __attribute__((always_inline)) {
      store_tile<sums_tile<kM>(decltype(i)::value / kN, decltype(i)::value % kN)>(sums[decltype(i)::value]);
    });
    for (int n = 0; n < kN; ++n) {
      const __m512 scale = _mm512_loadu_ps(w.scales(panel + n) + g * kPanel);
      const int64_t column = (panel + n) * kPanel;
      const __mmask16 lanes = first_lanes(w.columns - column);
      const __m512 bias = p.bias == nullptr ? _mm512_setzero_ps() : widened(p.bias + column, lanes);
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t tile = m / kTileRows * kN + n, place = m % kTileRows * kPanel;
        __m512i exact = _mm512_load_si512(sums[tile] + place);
        if constexpr (kBits == 8) exact = _mm512_sub_epi32(exact, _mm512_set1_epi32(kEightBitZero * p.x.sums[row + m]));
        const __m512 before = g == 0 ? _mm512_setzero_ps() : _mm512_load_ps(totals[tile] + place);
        const __m512 total = _mm512_add_ps(before, _mm512_mul_ps(_mm512_cvtepi32_ps(exact), scale));
        if (g + 1 < groups) {
          _mm512_store_ps(totals[tile] + place, total);
          continue;
        }
        __m512 value = _mm512_mul_ps(total, _mm512_set1_ps(p.x.scales[row + m]));
        if (p.bias != nullptr) value = _mm512_add_ps(value, bias);
        store_rounded(p.out + (row + m) * w.columns + column, value, lanes);
      }
    }
  }
}

template <typename T, int kBits, int kM>
void rows_of(const LowBitProduct<T>& p, int64_t row, int64_t rows, int64_t first, int64_t last, TilePanels panels) {
  constexpr int kN = 4 / kM;
  for (; first + kN <= last; first += kN, panels.first += kN * panels.apart)
    block<T, kBits, kM, kN>(p, row, rows, first, panels);
  if constexpr (kN > 2)
    for (; first + 2 <= last; first += 2, panels.first += 2 * panels.apart)
      block<T, kBits, kM, 2>(p, row, rows, first, panels);
  for (; first < last; ++first, panels.first += panels.apart) block<T, kBits, kM, 1>(p, row, rows, first, panels);
}

template <typename T, int kBits>
void multiply_bits(const LowBitProduct<T>& p, int64_t row, int64_t rows, int64_t first, int64_t last,
                   uint8_t* scratch) {
  constexpr uint8_t kAll = kTileRows;
  TilePanels panels{p.weight.values(first), p.weight.bytes()};
  if constexpr (kBits != 8) {
    panels = {scratch, padded_depth(p.weight.depth) * kPanel};
    for (int64_t panel = first; panel < last; ++panel)
      unpack(p.weight, panel, scratch + (panel - first) * panels.apart);
  }
  for (int64_t at = 0; at < rows; at += 2 * kTileRows) {
    const int64_t count = rows - at < 2 * kTileRows ? rows - at : 2 * kTileRows;
    const uint8_t upper = static_cast<uint8_t>(count < kTileRows ? count : kTileRows);
    if (count <= kTileRows) {
      Tiles tiles({upper, upper, upper, upper, upper, kAll, kAll, kAll});
      rows_of<T, kBits, 1>(p, row + at, count, first, last, panels);
    } else {
      const uint8_t lower = static_cast<uint8_t>(count - kTileRows);
      Tiles tiles({kAll, kAll, lower, lower, kAll, lower, kAll, kAll});
      rows_of<T, kBits, 2>(p, row + at, count, first, last, panels);
    }
  }
}

}  // namespace

namespace amx {

template <typename T>
void multiply(const LowBitProduct<T>& p, int64_t row, int64_t rows, int64_t first, int64_t last, uint8_t* scratch) {
  if (p.weight.bits == 8) return multiply_bits<T, 8>(p, row, rows, first, last, scratch);
  multiply_bits<T, 4>(p, row, rows, first, last, scratch);
}

template void multiply(const LowBitProduct<float>&, int64_t, int64_t, int64_t, int64_t, uint8_t*);
template void multiply(const LowBitProduct<bf16>&, int64_t, int64_t, int64_t, int64_t, uint8_t*);

}  // namespace amx
}  // namespace paceline
