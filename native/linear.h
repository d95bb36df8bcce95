// The panel format of packed weights, and the product that every variant of the matrix kernel computes.
#pragma once

#include <cstdint>

#include "vec.h"

namespace paceline {

constexpr int64_t kPanel = 16;  // columns of W^T side by side
constexpr int64_t kGroup = 4;   // panels per task: read from memory once for all rows of the task

// Values of k side by side in a panel, 4 bytes: panel[k / kDeep][column][k % kDeep], zero past the depth.
template <typename T>
constexpr int64_t kDeep = 4 / sizeof(T);

constexpr int64_t kBf16TileDepth = 32;  // k per tile register of bfloat16; panels have a multiple of it

// Always inlined, as files compiled for different CPUs share it.
__attribute__((always_inline)) inline int64_t panel_size(int64_t depth) {
  return (depth + kBf16TileDepth - 1) / kBf16TileDepth * kBf16TileDepth * kPanel;
}

template <typename T, typename X>
struct Product {
  const X* x;  // [rows, depth], stride between rows
  int64_t stride, depth, columns;
  const T* panels;
  const T* bias;
  T* out;  // [rows, columns]

  __attribute__((always_inline)) const T* panel(int64_t index) const { return panels + index * panel_size(depth); }
};

namespace avx512 {

// Rows [row, row + rows) of the product, in the columns of the panels [first, last); bfloat16 with its own
// instructions.
template <typename T>
void multiply(const Product<T, T>& product, int64_t row, int64_t rows, int64_t first, int64_t last);

}  // namespace avx512

constexpr int64_t kTileRows = 16;

// x in tiles: [rows / 16][depth / 32][16][32], zero past the depth; rows past the last hold anything.
struct TileProduct {
  const bf16* x;
  int64_t depth, columns;
  const bf16 *panels, *bias;
  bf16* out;
};

namespace amx {

// As avx512::multiply; `row` is a multiple of 16.
void multiply(const TileProduct& product, int64_t row, int64_t rows, int64_t first, int64_t last);

}  // namespace amx
}  // namespace paceline
