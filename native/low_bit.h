// Low-bit weights: their panels, the rows they are multiplied by, and the product that every variant computes.
//
// Integer sums are exact in int32 (partial sums may wrap, the result fits), so variants may sum in any order. The order
// of the float32 operations is fixed: models/ops/low_bit.py defines it.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "linear.h"

namespace paceline {

constexpr int64_t kTileDepth = 64;    // inputs of eight bits in a row of 64 bytes; rows and panels are padded to it
constexpr int64_t kQuad = 4;          // inputs side by side in a panel
constexpr int32_t kEightBitZero = 128;  // offset of stored eight-bit values: panels are unsigned

// Always inlined, as files compiled for different CPUs share them.
#define PACELINE_INLINE __attribute__((always_inline)) inline

PACELINE_INLINE int64_t padded_depth(int64_t depth) { return (depth + kTileDepth - 1) / kTileDepth * kTileDepth; }

// Layout of a panel of 16 outputs: values, then scales float32 [groups][16], then (4 bits) zero points uint8
// [groups][16]. Values of 8 bits: [padded depth / 4][16][4], offset by 128. Of 4 bits: 64 bytes hold 8 inputs, the low
// halves inputs 0..3 as [16][4], the high halves inputs 4..7.
struct LowBitPanels : LowBitWeight {
  PACELINE_INLINE LowBitPanels(const LowBitWeight& weight) : LowBitWeight(weight) {}

  PACELINE_INLINE int64_t group_depth() const { return padded_depth(depth) / groups; }
  PACELINE_INLINE int64_t value_bytes() const { return padded_depth(depth) * kPanel * bits / 8; }
  PACELINE_INLINE int64_t bytes() const {
    return value_bytes() + groups * kPanel * 4 + (bits == 8 ? 0 : (groups * kPanel + 63) / 64 * 64);
  }
  PACELINE_INLINE const uint8_t* values(int64_t panel) const { return panels + panel * bytes(); }
  PACELINE_INLINE const float* scales(int64_t panel) const {
    return reinterpret_cast<const float*>(values(panel) + value_bytes());
  }
  PACELINE_INLINE const uint8_t* zeros(int64_t panel) const { return values(panel) + value_bytes() + groups * kPanel * 4; }
};

// Rows of activations, each value scale * int8; a row with a non-finite value has zeros and a scale of NaN.
struct QuantisedRows {
  const int8_t* values;  // [rows, padded depth], zero past the depth
  const float* scales;   // [rows]
  const int32_t* sums;   // [rows, groups], of the values of a group
};

template <typename T>
struct LowBitProduct {
  QuantisedRows x;
  LowBitPanels weight;
  const T* bias;  // or null
  T* out;         // [rows, columns]
};

namespace avx512 {

// Rows [row, row + rows) of the product, in the columns of the panels [first, last).
template <typename T>
void multiply(const LowBitProduct<T>& product, int64_t row, int64_t rows, int64_t first, int64_t last);

}  // namespace avx512

namespace amx {

// The same if groups of inputs are whole tiles. scratch, not used for 8 bits: kGroup panels of bytes, on a cache line.
template <typename T>
void multiply(const LowBitProduct<T>& product, int64_t row, int64_t rows, int64_t first, int64_t last, uint8_t* scratch);

}  // namespace amx
}  // namespace paceline
