// y = x W^T + b with the same order of every element's sum for any batch: one fused multiply-add per k, k rising.
//
// Owns the packing and merging of weights, the division of the work, and the kernel for AVX2; the one in linear_avx512.cpp is equal
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

// Turns eight vectors of eight into their columns.
inline void transpose(f32x8 (&x)[kLanes]) {
  f32x8 y[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < kLanes; i += 4)
    for (int j = i; j < i + 2; ++j) {
      x[j] = __builtin_shufflevector(y[j], y[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      x[j + 2] = __builtin_shufflevector(y[j], y[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    y[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    y[i + 4] = __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  std::memcpy(x, y, sizeof y);
}

// One panel of `present` <= kPanel rows of a weight, eight columns and eight times four bytes at a time.
template <typename T>
void pack_panel(const T* weight, int64_t present, int64_t depth, T* out) {
  constexpr int64_t deep = kDeep<T>, step = kLanes * deep;
  int64_t k = 0;
  for (; present == kPanel && k + step <= depth; k += step)
    for (int64_t half = 0; half < kPanel; half += kLanes) {
      f32x8 lines[kLanes];
      for (int i = 0; i < kLanes; ++i) std::memcpy(lines + i, weight + (half + i) * depth + k, sizeof lines[i]);
      transpose(lines);
      for (int i = 0; i < kLanes; ++i) std::memcpy(out + (k + i * deep) * kPanel + half * deep, lines + i, sizeof lines[i]);
    }
  for (; k < depth; k += deep)
    for (int64_t n = 0; n < kPanel; ++n)
      for (int64_t i = 0; i < deep; ++i)
        out[k * kPanel + n * deep + i] = n < present && k + i < depth ? weight[n * depth + k + i] : T{};
  std::fill(out + k * kPanel, out + panel_size(depth), T{});
}

// kM rows of a weight plus their update, from row `row` on, kN vectors from value k on, the last with `count` values:
// sums in float32, r rising; rounded once.
template <int kM, int kN, typename T>
inline void merge_block(const T* weight, int64_t depth, const LowRank& u, int64_t row, int64_t k, int count, T* out) {
  const float *b = u.b + (row - u.start) * u.rank, *a = u.a + k;
  f32x8 sums[kM][kN] = {};
  for (int64_t r = 0; r < u.rank; ++r, a += depth) {
    f32x8 part[kN];
#pragma GCC unroll 4
    for (int c = 0; c < kN; ++c) part[c] = kN > 1 || count == kLanes ? load(a + c * kLanes) : load(a + c * kLanes, count);
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      f32x8 each = splat(b[m * u.rank + r]);
#pragma GCC unroll 4
      for (int c = 0; c < kN; ++c) sums[m][c] = fma(each, part[c], sums[m][c]);
    }
  }
  const float scale = static_cast<float>(u.scale);
#pragma GCC unroll 8
  for (int m = 0; m < kM; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < kN; ++c) {
      const int64_t at = m * depth + k + c * kLanes;
      store(out + at, sums[m][c] * scale + load(weight + row * depth + at, count), count);
    }
}

// All values of kM rows.
template <int kM, typename T>
void merge_block(const T* weight, int64_t depth, const LowRank& u, int64_t row, T* out) {
  constexpr int64_t kStep = 3 * kLanes;  // with four rows, 12 sums leave 4 of 16 registers
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) merge_block<kM, 3>(weight, depth, u, row, k, kLanes, out);
  for (; k < depth; k += kLanes)
    merge_block<kM, 1>(weight, depth, u, row, k, static_cast<int>(std::min<int64_t>(kLanes, depth - k)), out);
}

// Rows [first, last) of the merged weight -> out.
template <typename T>
void merge(const Adapted<T>& of, int64_t depth, int64_t first, int64_t last, T* out) {
  for (int64_t row = first; row < last;) {
    const LowRank* update = nullptr;
    int64_t end = last;  // of the rows that are treated alike
    for (int64_t i = 0; i < of.count; ++i) {
      const LowRank& u = of.updates[i];
      if (u.start <= row && row < u.stop) update = &u, end = std::min(end, u.stop);
      if (u.start > row) end = std::min(end, u.start);
    }
    if (update == nullptr) {
      std::memcpy(out + (row - first) * depth, of.weight + row * depth, (end - row) * depth * sizeof(T));
      row = end;
    }
    for (; row + 4 <= end; row += 4) merge_block<4>(of.weight, depth, *update, row, out + (row - first) * depth);
    for (; row < end; ++row) merge_block<1>(of.weight, depth, *update, row, out + (row - first) * depth);
  }
}

}  // namespace

int64_t packed_size(int64_t columns, int64_t depth) { return (columns + kPanel - 1) / kPanel * panel_size(depth); }

template <typename T>
void pack_weight(const T* weight, int64_t columns, int64_t depth, T* out) {
  const int64_t all = (columns + kPanel - 1) / kPanel;
  for (int64_t panel = 0; panel < all; ++panel)
    pack_panel(weight + panel * kPanel * depth, std::min(kPanel, columns - panel * kPanel), depth,
               out + panel * panel_size(depth));
}

namespace {

// One task of a product with its own panels: kOwn at a time, packed where they are used.
constexpr int64_t kOwn = 2;

// `fill(first, last, to)` packs panels [first, last); without it (nullptr), `panels` has all.
template <typename T, typename Fill>
void product(const T* x, int64_t stride, const T* panels, [[maybe_unused]] Fill fill, const T* bias, T* out, int64_t rows,
             int64_t columns, int64_t depth, int threads) {
  static thread_local std::vector<float> wide;
  constexpr bool kFills = !std::is_same_v<Fill, std::nullptr_t>;
  const int64_t all = (columns + kPanel - 1) / kPanel;
  const bool in_tiles = std::is_same_v<T, bf16> && has_amx();
  const int64_t chunk = in_tiles ? std::max<int64_t>(64, 4 * kCacheFloats / std::max<int64_t>(depth, 1) / 32 * 32)
                                 : std::max<int64_t>(24, kCacheFloats / std::max<int64_t>(depth, 1) / 12 * 12);
  const bool parallel = threads > 1 && rows * columns * depth > kParallelWork;
  auto for_each = [&](auto whole, auto run) {
    if constexpr (kFills) {
      const int64_t tasks = (all + kOwn - 1) / kOwn;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (parallel)
      for (int64_t i = 0; i < tasks; ++i) {
        static thread_local Lines<T> own;
        const int64_t first = i * kOwn, last = std::min(all, first + kOwn);
        T* to = own.take(kOwn * panel_size(depth));
        fill(first, last, to);
        auto part = whole;
        part.panels = to - first * panel_size(depth);  // so that panel `first` is the first one here
        for (int64_t row = 0; row < rows; row += chunk) run(part, row, std::min(chunk, rows - row), first, last);
      }
    } else {
      const int64_t groups = (all + kGroup - 1) / kGroup, tasks = groups * ((rows + chunk - 1) / chunk);
#pragma omp parallel for num_threads(threads) schedule(static) if (parallel)
      for (int64_t i = 0; i < tasks; ++i) {
        int64_t row = i / groups * chunk, panel = i % groups * kGroup;
        run(whole, row, std::min(chunk, rows - row), panel, std::min(all, panel + kGroup));
      }
    }
  };
#if defined(PACELINE_AMX)
  if constexpr (std::is_same_v<T, bf16>)
    if (in_tiles) {
      static thread_local Lines<bf16> tiles;
      TileProduct whole{as_tiles(x, rows, stride, depth, threads, tiles), depth, columns, panels, bias, out};
      return for_each(whole, [](auto&&... part) { amx::multiply(part...); });
    }
#endif
#if defined(PACELINE_AVX512)
  if (has_avx512()) {
    Product<T, T> whole{x, stride, depth, columns, panels, bias, out};
    return for_each(whole, [](auto&&... part) { avx512::multiply(part...); });
  }
#endif
  const float* x_float = as_float(x, rows, stride, depth, wide);
  Product<T, float> whole{x_float, stride, depth, columns, panels, bias, out};
  for_each(whole, [](auto&&... part) { task(part...); });
}

}  // namespace

template <typename T>
void linear(const T* x, int64_t stride, const T* weight, bool packed, const T* bias, T* out, int64_t rows,
            int64_t columns, int64_t depth, int threads) {
  if (packed) return product(x, stride, weight, nullptr, bias, out, rows, columns, depth, threads);
  auto fill = [&](int64_t first, int64_t last, T* to) {
    pack_weight(weight + first * kPanel * depth, std::min(last * kPanel, columns) - first * kPanel, depth, to);
  };
  product<T>(x, stride, nullptr, fill, bias, out, rows, columns, depth, threads);
}

template <typename T>
void adapted_linear(const T* x, int64_t stride, const Adapted<T>& weight, const T* bias, T* out, int64_t rows,
                    int64_t columns, int64_t depth, int threads) {
  auto fill = [&](int64_t first, int64_t last, T* to) {
    static thread_local Lines<T> merged;
    const int64_t from = first * kPanel, count = std::min(last * kPanel, columns) - from;
    T* rows_of = merged.take(kOwn * kPanel * depth);
    merge(weight, depth, from, from + count, rows_of);
    pack_weight(rows_of, count, depth, to);
  };
  product<T>(x, stride, nullptr, fill, bias, out, rows, columns, depth, threads);
}

template <typename T>
void merge_rows(const Adapted<T>& weight, T* out, int64_t rows, int64_t depth, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * depth > kParallelWork / 8)
  for (int64_t row = 0; row < rows; row += kPanel)
    merge(weight, depth, row, std::min(rows, row + kPanel), out + row * depth);
}

#define INSTANTIATE(T)                                                                                              \
  template void pack_weight(const T*, int64_t, int64_t, T*);                                                        \
  template void merge_rows(const Adapted<T>&, T*, int64_t, int64_t, int);                                           \
  template void adapted_linear(const T*, int64_t, const Adapted<T>&, const T*, T*, int64_t, int64_t, int64_t, int); \
  template void linear(const T*, int64_t, const T*, bool, const T*, T*, int64_t, int64_t, int64_t, int);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace paceline
