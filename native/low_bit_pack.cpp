// Packs low-bit weights into panels, and rounds rows of activations to eight bits.
//
// Owns both roundings, and the layouts that the products read. Invariant: a row's integers depend on the row only, and
// are those of models/ops/low_bit.py's quantise_tokens.
#include <algorithm>
#include <vector>

#include "low_bit.h"

namespace paceline {
namespace {

typedef int8_t i8x8 __attribute__((vector_size(8)));
typedef uint8_t u8x4 __attribute__((vector_size(4)));
typedef uint64_t u64x4 __attribute__((vector_size(32)));

constexpr int32_t kInfinity = 0x7F800000;  // as bits: values that are not less are not finite
constexpr float kSmallest = 0x1p-100f;     // of a row's largest value: below, 127 / max might be infinite
constexpr float kLevels = 127.0f;
constexpr int64_t kParallelElements = 1 << 15;

// Four bytes of a row of values, zero past its end.
inline uint32_t four_bytes(const uint8_t* row, int64_t byte, int64_t bytes) {
  uint32_t out = 0;
  if (row != nullptr && byte < bytes) std::memcpy(&out, row + byte, std::min<int64_t>(4, bytes - byte));
  return out;
}

// Transposes eight rows of eight times four bytes: out[j][i] is row i's j-th.
inline void turn(u32x8 (&x)[8]) {
  u32x8 y[8];
  for (int i = 0; i < 4; ++i) {
    y[2 * i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], u32x8{0, 8, 2, 10, 4, 12, 6, 14});
    y[2 * i + 1] = __builtin_shuffle(x[2 * i], x[2 * i + 1], u32x8{1, 9, 3, 11, 5, 13, 7, 15});
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + j] = __builtin_shuffle(y[i + j], y[i + j + 2], u32x8{0, 1, 8, 9, 4, 5, 12, 13});
      x[i + j + 2] = __builtin_shuffle(y[i + j], y[i + j + 2], u32x8{2, 3, 10, 11, 6, 7, 14, 15});
    }
  for (int i = 0; i < 4; ++i) {
    y[i] = __builtin_shuffle(x[i], x[i + 4], u32x8{0, 1, 2, 3, 8, 9, 10, 11});
    y[i + 4] = __builtin_shuffle(x[i], x[i + 4], u32x8{4, 5, 6, 7, 12, 13, 14, 15});
  }
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}

// Inputs 0..3 of eight packed in four bytes (even inputs in low halves), one to a byte.
inline u32x8 apart(u32x8 x) {
  return (x & 0xFu) | ((x & 0xF0u) << 4) | ((x & 0xF00u) << 8) | ((x & 0xF000u) << 12);
}

// Four bytes of values as a panel stores them.
inline u32x8 stored(u32x8 x, int64_t bits) {
  return bits == 8 ? x ^ 0x80808080u : apart(x) | apart(x >> 16) << 4;
}

void pack_values(const LowBitPanels& w, const uint8_t* values, int64_t panel, uint8_t* out) {
  const int64_t bytes = w.depth * w.bits / 8, padded = padded_depth(w.depth) * w.bits / 8;
  const uint8_t* rows[kPanel];
  for (int64_t n = 0; n < kPanel; ++n) {
    int64_t column = panel * kPanel + n;
    rows[n] = column < w.columns ? values + column * bytes : nullptr;
  }
  const bool whole = rows[kPanel - 1] != nullptr;
  for (int64_t at = 0; at < padded; at += 32)
    for (int64_t half = 0; half < kPanel; half += 8) {
      u32x8 x[8];
      for (int i = 0; i < 8; ++i) {
        if (whole && at + 32 <= bytes)
          std::memcpy(&x[i], rows[half + i] + at, 32);
        else
          for (int j = 0; j < 8; ++j) x[i][j] = four_bytes(rows[half + i], at + 4 * j, bytes);
      }
      turn(x);
      for (int j = 0; j < 8; ++j) {
        u32x8 each = stored(x[j], w.bits);
        std::memcpy(out + (at / 4 + j) * 4 * kPanel + half * 4, &each, 32);
      }
    }
}

// The same for every output's `groups` scales or zero points: [groups][16].
template <typename E>
void pack_groups(const LowBitPanels& w, const E* source, int64_t panel, E* out) {
  for (int64_t n = 0; n < kPanel; ++n) {
    int64_t column = panel * kPanel + n;
    for (int64_t g = 0; g < w.groups; ++g) out[g * kPanel + n] = column < w.columns ? source[column * w.groups + g] : E{};
  }
}

// x / scale to the nearest integer, halves to even, between least and most, eight at a time.
inline i32x8 levels(f32x8 x, float scale, float zero, int32_t least, int32_t most) {
  const f32x8 shift = splat(0x1.8p23f);
  const f32x8 nearest = (x / splat(scale) + shift) - shift;
  i32x8 level = (i32x8)(nearest + splat(zero) + shift) - (i32x8)shift;
  level = level < splat_int(least) ? splat_int(least) : level;
  return level > splat_int(most) ? splat_int(most) : level;
}

// Rounds one output's inputs [depth] as models/low_bit.py's `quantise`: its bytes, scales and zero points.
template <typename T>
void quantise_output(const T* x, const LowBitPanels& w, int64_t bits, uint8_t* bytes, float* scales, uint8_t* zeros) {
  const int64_t group = w.depth / w.groups;
  const bool eight = w.bits == 8;
  const int32_t most = eight ? 127 : (1 << bits) - 1;
  for (int64_t g = 0; g < w.groups; ++g) {
    const int64_t first = g * group, end = first + group;
    f32x8 lows = {}, highs = {};  // 0 is always representable
    for (int64_t k = first; k < end; k += kLanes) {
      const f32x8 each = load(x + k, static_cast<int>(std::min<int64_t>(kLanes, end - k)));
      lows = select(each < lows, each, lows), highs = select(each > highs, each, highs);
    }
    const float low = -largest(-lows), high = largest(highs);
    float scale = (eight ? std::max(-low, high) : high - low) / static_cast<float>(most);
    if (!(scale > 0)) scale = 1.0f;
    const float zero = eight ? 0.0f : levels(splat(-low), scale, 0.0f, 0, most)[0];
    scales[g] = scale;
    if (!eight) zeros[g] = static_cast<uint8_t>(zero);
    for (int64_t k = first; k < end; k += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, end - k));
      const i32x8 level = levels(load(x + k, count), scale, zero, eight ? -most : 0, most);
      if (eight) {
        const i8x8 narrow = __builtin_convertvector(level, i8x8);
        std::memcpy(bytes + k, &narrow, count);
      } else {
        const u64x4 pairs = (u64x4)level;  // the even input in the low half of a lane
        const u8x4 narrow = __builtin_convertvector(pairs | pairs >> 28, u8x4);
        std::memcpy(bytes + k / 2, &narrow, count / 2);
      }
    }
  }
}

template <typename T>
void quantise_row(const T* x, int64_t depth, int64_t groups, int8_t* values, int64_t padded, float* scale,
                  int32_t* sums) {
  i32x8 most = {};
  for (int64_t k = 0; k < depth; k += kLanes) {
    int count = static_cast<int>(std::min<int64_t>(kLanes, depth - k));
    i32x8 bits = (i32x8)load(x + k, count) & 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits = std::max<int32_t>(bits, most[i]);
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  const bool finite = bits < kInfinity, counts = finite && largest >= kSmallest;
  *scale = counts ? largest / kLevels : finite ? 0.0f : NAN;
  if (!counts) {
    std::fill_n(values, padded, int8_t{0});
    if (sums != nullptr) std::fill_n(sums, groups, 0);
    return;
  }
  const float inverse = kLevels / largest;
  const f32x8 shift = splat(0x1.8p23f);  // adding it rounds to an integer, halves to even, which is then the low bits
  const int64_t group = groups == 1 ? depth : depth / groups;
  for (int64_t g = 0; g < groups; ++g) {
    i32x8 total = {};
    for (int64_t k = g * group; k < (g + 1) * group; k += kLanes) {
      int count = static_cast<int>(std::min<int64_t>(kLanes, depth - k));
      i32x8 q = (i32x8)(load(x + k, count) * inverse + shift) - (i32x8)shift;
      total += q;
      i8x8 narrow = __builtin_convertvector(q, i8x8);
      if (count == kLanes)
        std::memcpy(values + k, &narrow, kLanes);  // one store: a variable length would be a call
      else
        std::memcpy(values + k, &narrow, count);
    }
    if (sums != nullptr) {
      sums[g] = 0;
      for (int i = 0; i < kLanes; ++i) sums[g] += total[i];
    }
  }
  std::fill_n(values + depth, padded - depth, int8_t{0});
}

}  // namespace

int64_t LowBitWeight::packed_bytes() const { return (columns + kPanel - 1) / kPanel * LowBitPanels(*this).bytes(); }

void pack_low_bit(const LowBitWeight& shape, const uint8_t* values, const float* scales, const uint8_t* zeros,
                  uint8_t* out, int threads) {
  const LowBitPanels w(shape);
  const int64_t panels = (w.columns + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && panels * w.bytes() > kParallelElements)
  for (int64_t panel = 0; panel < panels; ++panel) {
    uint8_t *start = out + panel * w.bytes(), *after = start + w.value_bytes();
    pack_values(w, values, panel, start);
    pack_groups(w, scales, panel, reinterpret_cast<float*>(after));
    if (w.bits != 8) pack_groups(w, zeros, panel, after + w.groups * kPanel * 4);
  }
}

template <typename T>
void quantise_pack(const T* weight, const LowBitWeight& shape, int64_t bits, uint8_t* out, int threads) {
  const LowBitPanels w(shape);
  const int64_t panels = (w.columns + kPanel - 1) / kPanel, bytes = w.depth * w.bits / 8;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && panels * w.bytes() > kParallelElements)
  for (int64_t panel = 0; panel < panels; ++panel) {
    LowBitPanels own(w);
    own.columns = std::min<int64_t>(kPanel, w.columns - panel * kPanel);
    std::vector<uint8_t> values(own.columns * bytes), zeros(own.columns * w.groups);
    std::vector<float> scales(own.columns * w.groups);
    for (int64_t n = 0; n < own.columns; ++n)
      quantise_output(weight + (panel * kPanel + n) * w.depth, w, bits, values.data() + n * bytes,
                      scales.data() + n * w.groups, zeros.data() + n * w.groups);
    uint8_t *start = out + panel * w.bytes(), *after = start + w.value_bytes();
    pack_values(own, values.data(), 0, start);
    pack_groups(own, scales.data(), 0, reinterpret_cast<float*>(after));
    if (w.bits != 8) pack_groups(own, zeros.data(), 0, after + w.groups * kPanel * 4);
  }
}

template void quantise_pack(const float*, const LowBitWeight&, int64_t, uint8_t*, int);
template void quantise_pack(const bf16*, const LowBitWeight&, int64_t, uint8_t*, int);

template <typename T>
void quantise_rows(const T* x, int64_t stride, int64_t rows, int64_t depth, int64_t groups, int8_t* values,
                   int64_t value_stride, float* scales, int32_t* sums, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * depth > kParallelElements)
  for (int64_t row = 0; row < rows; ++row)
    quantise_row(x + row * stride, depth, groups, values + row * value_stride, value_stride, scales + row,
                 sums == nullptr ? nullptr : sums + row * groups);
}

template void quantise_rows(const float*, int64_t, int64_t, int64_t, int64_t, int8_t*, int64_t, float*, int32_t*, int);
template void quantise_rows(const bf16*, int64_t, int64_t, int64_t, int64_t, int8_t*, int64_t, float*, int32_t*, int);

}  // namespace paceline
