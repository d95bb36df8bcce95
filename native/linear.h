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

// Always inlined, as files compiled for different CPUs share it.
__attribute__((always_inline)) inline int64_t panel_size(int64_t depth) { return (depth + 1) / 2 * 2 * kPanel; }

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

// Rows [row, row + rows) of the product, in the columns of the panels [first, last); bfloat16 with its own instructions.
template <typename T>
void multiply(const Product<T, T>& product, int64_t row, int64_t rows, int64_t first, int64_t last);

}  // namespace avx512
}  // namespace paceline
