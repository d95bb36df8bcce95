// y = x W^T + b with low-bit W: rows are rounded to eight bits, then exact integer sums, then float32 in one order.
//
// Owns the division of the work and the kernel for AVX2 and all other targets (plain vectors). Invariant: the bits of a
// result depend on its row, its column's weights and the format, never on batch, threads or kind of CPU.
#include "low_bit.h"

#include <algorithm>
#include <vector>

#include "cpu.h"

namespace paceline {
namespace {

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef int64_t i64x4 __attribute__((vector_size(32)));

constexpr int kRows = 3;                        // 3 x 4 sums fill the registers of AVX2
constexpr int64_t kParts = 4;                   // vectors of sums of a panel: four outputs each, two sums to an output
constexpr int64_t kCacheBytes = 1 << 18;        // rows of x per task, so that they stay in the second-level cache
constexpr int64_t kParallelWork = 1 << 18;      // multiply-adds below which a second thread costs more than it gives

#if defined(PACELINE_AMX)
// Rows from which tiles are faster than VNNI: values of 4 bits are unpacked first.
int64_t least_tile_rows(const LowBitWeight& weight) { return weight.bits == 8 ? 12 : 24; }
#endif

struct alignas(64) Line {
  uint8_t bytes[64];
};

// Sums of neighbours. Exact, since bytes are multiplied after widening to 16 bits (maddubs would saturate).
inline u32x8 dot(i16x16 a, i16x16 b) {
#if defined(__AVX2__)
  return (u32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  u32x8 out;
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<uint32_t>(a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1]);
  return out;
#endif
}

// Four values of a row, in each quarter of a vector.
inline i16x16 four_values(const int16_t* x) {
  int64_t all;
  std::memcpy(&all, x, sizeof all);
  return (i16x16)i64x4{all, all, all, all};
}

// kM rows, widened to 16 bits at x, times a panel.
template <int kM, typename T>
void block(const LowBitProduct<T>& p, int64_t row, int64_t panel, const int16_t* x) {
  const LowBitPanels& w = p.weight;
  const int64_t stride = padded_depth(w.depth), deep = w.group_depth();
  const bool eight = w.bits == 8;
  const uint8_t* at = w.values(panel);
  f32x8 totals[kM][2] = {};
  for (int64_t g = 0; g < w.groups; ++g) {
    u32x8 sums[kM][kParts] = {};
    auto step = [&](const u8x16 (&weights)[kParts]) __attribute__((always_inline)) {
      i16x16 wide[kParts];
      for (int c = 0; c < kParts; ++c) wide[c] = __builtin_convertvector(weights[c], i16x16);
      for (int m = 0; m < kM; ++m) {
        i16x16 each = four_values(x + m * stride);
        for (int c = 0; c < kParts; ++c) sums[m][c] += dot(wide[c], each);
      }
      x += kQuad;
    };
    for (int64_t k = 0; k < deep; k += eight ? kQuad : 2 * kQuad, at += kPanel * kQuad) {
      u8x16 weights[kParts];
      std::memcpy(weights, at, sizeof weights);
      if (eight) {
        step(weights);
        continue;
      }
      u8x16 low[kParts], high[kParts];
      for (int c = 0; c < kParts; ++c) low[c] = weights[c] & 15, high[c] = weights[c] >> 4;
      step(low);
      step(high);
    }
    for (int half = 0; half < 2; ++half) {
      i32x8 zero = splat_int(kEightBitZero);
      if (!eight)
        for (int n = 0; n < kLanes; ++n) zero[n] = w.zeros(panel)[g * kPanel + half * kLanes + n];
      const f32x8 scale = load(w.scales(panel) + g * kPanel + half * kLanes);
      for (int m = 0; m < kM; ++m) {
        uint32_t pairs[2 * kLanes];
        std::memcpy(pairs, &sums[m][half * 2], sizeof pairs);
        u32x8 exact;
        for (int n = 0; n < kLanes; ++n) exact[n] = pairs[2 * n] + pairs[2 * n + 1];
        i32x8 centred = (i32x8)(exact - (u32x8)(zero * p.x.sums[(row + m) * w.groups + g]));
        totals[m][half] += __builtin_convertvector(centred, f32x8) * scale;
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    int64_t column = panel * kPanel + half * kLanes;
    if (column >= w.columns) break;
    int count = static_cast<int>(std::min<int64_t>(kLanes, w.columns - column));
    for (int m = 0; m < kM; ++m) {
      f32x8 value = totals[m][half] * p.x.scales[row + m];
      if (p.bias != nullptr) value += load(p.bias + column, count);
      store(p.out + (row + m) * w.columns + column, value, count);
    }
  }
}

template <typename T>
void task(const LowBitProduct<T>& p, int64_t row, int64_t rows, int64_t first, int64_t last) {
  static thread_local std::vector<int16_t> wide;
  const int64_t stride = padded_depth(p.weight.depth);
  wide.resize(rows * stride);
  std::copy_n(p.x.values + row * stride, rows * stride, wide.data());
  for (int64_t panel = first; panel < last; ++panel) {
    int64_t at = 0;
    for (; at + kRows <= rows; at += kRows) block<kRows>(p, row + at, panel, wide.data() + at * stride);
    if (rows - at == 2) block<2>(p, row + at, panel, wide.data() + at * stride);
    if (rows - at == 1) block<1>(p, row + at, panel, wide.data() + at * stride);
  }
}

}  // namespace

template <typename T>
void low_bit_linear(const T* x, int64_t stride, const LowBitWeight& weight, const T* bias, T* out, int64_t rows,
                    int threads, int8_t* values_out, float* scales_out) {
  static thread_local std::vector<Line> values;
  static thread_local std::vector<float> scales;
  static thread_local std::vector<int32_t> sums;
  const int64_t padded = padded_depth(weight.depth);
  values.resize(rows * padded / kTileDepth);
  scales.resize(rows);
  sums.resize(rows * weight.groups);
  int8_t* start = reinterpret_cast<int8_t*>(values.data());
  quantise_rows(x, stride, rows, weight.depth, weight.groups, start, padded, scales.data(), sums.data(), threads);
  if (values_out != nullptr) {
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(values_out + row * weight.depth, start + row * padded, weight.depth);
    std::copy_n(scales.data(), rows, scales_out);
  }
  const LowBitProduct<T> product{{start, scales.data(), sums.data()}, weight, bias, out};
  const int64_t all = (weight.columns + kPanel - 1) / kPanel, groups = (all + kGroup - 1) / kGroup;
  const int64_t block = 96;  // rows: whole blocks of the kernels for AVX-512 and for tiles
  const int64_t chunk = std::max<int64_t>(block, kCacheBytes / std::max<int64_t>(padded, 1) / block * block);
  const int64_t tasks = groups * ((rows + chunk - 1) / chunk);
  auto for_each = [&](auto run) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * weight.columns * weight.depth > kParallelWork)
    for (int64_t i = 0; i < tasks; ++i) {
      int64_t row = i / groups * chunk, panel = i % groups * kGroup;
      run(product, row, std::min(chunk, rows - row), panel, std::min(all, panel + kGroup));
    }
  };
#if defined(PACELINE_AMX)
  const LowBitPanels& panels = product.weight;
  if (has_amx() && rows >= least_tile_rows(weight) && panels.group_depth() % kTileDepth == 0)
    return for_each([&](auto... part) {
      static thread_local std::vector<Line> scratch;
      if (weight.bits != 8) scratch.resize(kGroup * kPanel * padded / sizeof(Line));
      amx::multiply(part..., reinterpret_cast<uint8_t*>(scratch.data()));
    });
#endif
#if defined(PACELINE_AVX512)
  if (has_avx512()) return for_each([](auto... part) { avx512::multiply(part...); });
#endif
  for_each([](auto... part) { task(part...); });
}

template void low_bit_linear(const float*, int64_t, const LowBitWeight&, const float*, float*, int64_t, int,
                             int8_t*, float*);
template void low_bit_linear(const bf16*, int64_t, const LowBitWeight&, const bf16*, bf16*, int64_t, int, int8_t*,
                             float*);

}  // namespace paceline
