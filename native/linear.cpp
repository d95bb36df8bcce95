// y = x W^T + b with the same order of every element's sum for any batch: one fused multiply-add per k, k rising.
//
// Owns the packing of weights, the division of the work, and the kernel for AVX2; the one in linear_avx512.cpp is equal
// bitwise in float32. Invariant: blocking, threads and batch size choose which elements are computed together, never
// the order inside one of them.
#include "linear.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <vector>

#include "cpu.h"
#include "kernels.h"

namespace paceline {
namespace {

constexpr int kRows = 6;               // 6 x 16 sums fill the 16 vector registers of AVX2
constexpr int64_t kCacheFloats = 65536;  // rows of x per task, so that they stay in the second-level cache
constexpr int64_t kParallelWork = 1 << 19;  // multiply-adds below which a second thread costs more than it gives

// Eight columns of a panel, from `column` on, at depth k.
inline f32x8 load_at(const float* panel, int64_t k, int64_t column) { return load(panel + k * kPanel + column); }
inline f32x8 load_at(const bf16* panel, int64_t k, int64_t column) {
  u32x8 pairs;
  std::memcpy(&pairs, panel + (k / 2 * kPanel + column) * 2, sizeof pairs);
  return (f32x8)((pairs << (k % 2 ? 0 : 16)) & 0xFFFF0000u);
}

// kM rows times kPanels panels from number `panel` on, whose weights (stored as W) begin at `weights`.
template <int kM, int kPanels, typename T, typename W>
void block(const Product<T, float>& p, int64_t row, int64_t panel, const W* weights) {
  f32x8 sums[kM][2 * kPanels] = {};
  const float* x = p.x + row * p.stride;
  const int64_t apart = panel_size(p.depth);
  for (int64_t k = 0; k < p.depth; ++k) {
    f32x8 w[2 * kPanels];
#pragma GCC unroll 8
    for (int c = 0; c < 2 * kPanels; ++c) w[c] = load_at(weights + (c / 2) * apart, k, (c % 2) * kLanes);
#pragma GCC unroll 6
    for (int m = 0; m < kM; ++m) {
      f32x8 each = splat(x[m * p.stride + k]);
#pragma GCC unroll 8
      for (int c = 0; c < 2 * kPanels; ++c) sums[m][c] = fma(each, w[c], sums[m][c]);
    }
  }
  for (int c = 0; c < 2 * kPanels; ++c) {
    int64_t column = panel * kPanel + c * kLanes;
    if (column >= p.columns) break;
    int count = static_cast<int>(std::min<int64_t>(kLanes, p.columns - column));
    for (int m = 0; m < kM; ++m) {
      f32x8 value = sums[m][c];
      if (p.bias != nullptr) value += load(p.bias + column, count);
      store(p.out + (row + m) * p.columns + column, value, count);
    }
  }
}

// Enough panels at a time to keep at least eight sums in flight, which hides the latency of the multiply-add.
template <int kM, int kPanels, typename T>
void rows_of(const Product<T, float>& p, int64_t row, int64_t first, int64_t last) {
  for (; first + kPanels <= last; first += kPanels) block<kM, kPanels>(p, row, first, p.panel(first));
  for (; first < last; ++first) block<kM, 1>(p, row, first, p.panel(first));
}

// A panel as floats. Widening is exact, so it changes no sum; it pays once several blocks of rows share the panel.
const float* widened(const float* panel, int64_t, std::vector<float>&) { return panel; }

const float* widened(const bf16* panel, int64_t depth, std::vector<float>& wide) {
  wide.resize(depth * kPanel);
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t column = 0; column < kPanel; column += kLanes)
      store(wide.data() + k * kPanel + column, load_at(panel, k, column));
  return wide.data();
}

template <typename T>
void task(const Product<T, float>& p, int64_t row, int64_t rows, int64_t first, int64_t last) {
  static thread_local std::vector<float> wide;
  int64_t whole = rows / kRows * kRows;
  for (int64_t panel = first; whole > 0 && panel < last; ++panel) {
    const float* weights = widened(p.panel(panel), p.depth, wide);
    for (int64_t at = 0; at < whole; at += kRows) block<kRows, 1>(p, row + at, panel, weights);
  }
  switch (rows - whole) {
    case 5: return rows_of<5, 1>(p, row + whole, first, last);
    case 4: return rows_of<4, 1>(p, row + whole, first, last);
    case 3: return rows_of<3, 2>(p, row + whole, first, last);
    case 2: return rows_of<2, 2>(p, row + whole, first, last);
    case 1: return rows_of<1, 4>(p, row + whole, first, last);
  }
}

// Memory for elements that begins on a cache line: unaligned memory halves the speed of tile loads.
template <typename T>
class Lines {
 public:
  T* take(int64_t elements) {
    if (elements > elements_) {
      std::free(data_);
      elements_ = 0;
      data_ = static_cast<T*>(std::aligned_alloc(64, (elements * sizeof(T) + 63) / 64 * 64));
      if (data_ == nullptr) throw std::bad_alloc();
      elements_ = elements;
    }
    return data_;
  }
  ~Lines() { std::free(data_); }

 private:
  T* data_ = nullptr;
  int64_t elements_ = 0;
};

const float* as_float(const float* x, int64_t, int64_t&, int64_t, std::vector<float>&) { return x; }

const float* as_float(const bf16* x, int64_t rows, int64_t& stride, int64_t depth, std::vector<float>& wide) {
  wide.resize(rows * depth);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t k = 0; k < depth; k += kLanes) {
      int count = static_cast<int>(std::min<int64_t>(kLanes, depth - k));
      store(wide.data() + row * depth + k, load(x + row * stride + k, count), count);
    }
  stride = depth;
  return wide.data();
}

// x in the form of TileProduct.
const bf16* as_tiles(const bf16* x, int64_t rows, int64_t stride, int64_t depth, int threads, Lines<bf16>& tiles) {
  const int64_t steps = panel_size(depth) / (kBf16TileDepth * kPanel), blocks = (rows + kTileRows - 1) / kTileRows;
  bf16* const to = tiles.take(blocks * steps * kTileRows * kBf16TileDepth);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * depth > kParallelWork)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t step = 0; step < steps; ++step) {
      bf16* line = to + ((row / kTileRows * steps + step) * kTileRows + row % kTileRows) * kBf16TileDepth;
      int64_t count = std::min(kBf16TileDepth, depth - step * kBf16TileDepth);
      const bf16* from = x + row * stride + step * kBf16TileDepth;
      if (count == kBf16TileDepth) {
        std::memcpy(line, from, kBf16TileDepth * sizeof(bf16));
      } else {
        std::copy_n(from, count, line);
        std::fill(line + count, line + kBf16TileDepth, bf16{});
      }
    }
  return to;
}

}  // namespace

int64_t packed_size(int64_t columns, int64_t depth) { return (columns + kPanel - 1) / kPanel * panel_size(depth); }

template <typename T>
void pack_weight(const T* weight, int64_t columns, int64_t depth, T* out) {
  constexpr int64_t deep = kDeep<T>;
  for (int64_t first = 0; first < columns; first += kPanel) {
    int64_t present = std::min(kPanel, columns - first);
    for (int64_t k = 0; k < depth; k += deep, out += kPanel * deep)
      for (int64_t n = 0; n < kPanel; ++n)
        for (int64_t i = 0; i < deep; ++i)
          out[n * deep + i] = n < present && k + i < depth ? weight[(first + n) * depth + k + i] : T{};
    out = std::fill_n(out, panel_size(depth) - (depth + deep - 1) / deep * deep * kPanel, T{});
  }
}

template <typename T>
void linear(const T* x, int64_t stride, const T* weight, bool packed, const T* bias, T* out, int64_t rows,
            int64_t columns, int64_t depth, int threads) {
  static thread_local std::vector<float> wide;
  static thread_local Lines<T> panels;
  if (!packed) {
    T* to = panels.take(packed_size(columns, depth));
    pack_weight(weight, columns, depth, to);
    weight = to;
  }
  const int64_t all = (columns + kPanel - 1) / kPanel, groups = (all + kGroup - 1) / kGroup;
  const bool in_tiles = std::is_same_v<T, bf16> && has_amx();
  const int64_t chunk = in_tiles ? std::max<int64_t>(64, 4 * kCacheFloats / std::max<int64_t>(depth, 1) / 32 * 32)
                                 : std::max<int64_t>(24, kCacheFloats / std::max<int64_t>(depth, 1) / 12 * 12);
  const int64_t tasks = groups * ((rows + chunk - 1) / chunk);
  auto for_each = [&](auto run) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * columns * depth > kParallelWork)
    for (int64_t i = 0; i < tasks; ++i) {
      int64_t row = i / groups * chunk, panel = i % groups * kGroup;
      run(row, std::min(chunk, rows - row), panel, std::min(all, panel + kGroup));
    }
  };
#if defined(PACELINE_AMX)
  if constexpr (std::is_same_v<T, bf16>)
    if (in_tiles) {
      static thread_local Lines<bf16> tiles;
      TileProduct product{as_tiles(x, rows, stride, depth, threads, tiles), depth, columns, weight, bias, out};
      return for_each([&](auto... part) { amx::multiply(product, part...); });
    }
#endif
#if defined(PACELINE_AVX512)
  if (has_avx512()) {
    Product<T, T> product{x, stride, depth, columns, weight, bias, out};
    return for_each([&](auto... part) { avx512::multiply(product, part...); });
  }
#endif
  const float* x_float = as_float(x, rows, stride, depth, wide);
  Product<T, float> product{x_float, stride, depth, columns, weight, bias, out};
  for_each([&](auto... part) { task(product, part...); });
}

#define INSTANTIATE(T)                                          \
  template void pack_weight(const T*, int64_t, int64_t, T*);    \
  template void linear(const T*, int64_t, const T*, bool, const T*, T*, int64_t, int64_t, int64_t, int);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace paceline
