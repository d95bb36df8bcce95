// Shared by the passes over decoder blocks: their activations and the two halves of a block.
//
// Owns the order of the operations inside a block. Invariant: every number comes from the kernels that the separate
// operations call. So a row is bitwise that of models/transformer.py over the same kernels, for any number of threads
// and rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace paceline {

constexpr int64_t kPieceElements = 1 << 14;  // with fewer, a second thread costs more than it gives
constexpr int64_t kAlignment = 64;

// Runs f(first row, rows) over pieces of the rows; for operations on one row at a time.
template <typename Function>
void over_rows(int64_t rows, int64_t width, int threads, Function f) {
  const int64_t pieces = rows * width > kPieceElements ? std::min<int64_t>(threads, rows) : 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (pieces > 1)
  for (int64_t i = 0; i < pieces; ++i) {
    int64_t first = rows * i / pieces, last = rows * (i + 1) / pieces;
    f(first, last - first);
  }
}

// The activations of a step, consecutive in the workspace. Only their sizes if the workspace is null.
template <typename T>
struct Activations {
  Activations(const StackShape& s, int64_t rows, void* workspace) : next_(static_cast<char*>(workspace)) {
    const int64_t q_width = s.query_heads * s.head_dim, kv_width = s.kv_heads * s.head_dim;
    stream = take<T>(rows * s.hidden);
    normed = take<T>(rows * s.hidden);
    projected = take<T>(rows * s.hidden);
    qkv = take<T>(rows * (q_width + 2 * kv_width));
    q = take<T>(rows * q_width);
    k = take<T>(rows * kv_width);
    attended = take<T>(rows * q_width);
    gate_up = take<T>(rows * 2 * s.intermediate);
    activated = take<T>(rows * s.intermediate);
    cos = take<float>(rows * s.head_dim / 2);
    sin = take<float>(rows * s.head_dim / 2);
  }

  T *stream, *normed, *projected, *qkv, *q, *k, *attended, *gate_up, *activated;
  float *cos, *sin;
  int64_t bytes = 0;

  template <typename E>
  E* take(int64_t elements) {
    E* start = next_ == nullptr ? nullptr : reinterpret_cast<E*>(next_ + bytes);
    bytes += (elements * static_cast<int64_t>(sizeof(E)) + kAlignment - 1) / kAlignment * kAlignment;
    return start;
  }

 private:
  char* next_;
};

inline void check_range(const int64_t* values, int64_t rows, int64_t end, const char* name) {
  for (int64_t row = 0; row < rows; ++row)
    if (values[row] < 0 || values[row] >= end)
      throw std::out_of_range("row " + std::to_string(row) + ": " + name + " " + std::to_string(values[row]) +
                              " is outside 0.." + std::to_string(end - 1));
}

template <typename T>
void check_rows(const StackShape& s, const StackStep<T>& step) {
  check_range(step.tokens, step.rows, s.vocab, "token");
  check_range(step.positions, step.rows, s.positions, "position");
  check_range(step.kv_slots, step.rows, step.pages.cache_slots, "KV cache slot");
}

// The angles of the rows' positions.
template <typename T>
void take_angles(const StackShape& s, const float* cos, const float* sin, const StackStep<T>& step,
                 Activations<T>& a) {
  const int64_t half = s.head_dim / 2;
  for (int64_t row = 0; row < step.rows; ++row) {
    std::memcpy(a.cos + row * half, cos + step.positions[row] * half, half * sizeof(float));
    std::memcpy(a.sin + row * half, sin + step.positions[row] * half, half * sizeof(float));
  }
}

// out [rows, columns] = x [rows, depth] W^T + bias (or null), W one of a block's products.
template <typename T>
void project(const StackShape& s, const T* x, const void* weight, const T* bias, T* out, int64_t rows, int64_t columns,
             int64_t depth, int64_t groups, int threads) {
  if (s.bits == 0)
    return linear(x, depth, static_cast<const T*>(weight), true, bias, out, rows, columns, depth, threads);
  low_bit_linear(x, depth, {static_cast<const uint8_t*>(weight), s.bits, columns, depth, groups}, bias, out, rows,
                 threads);
}

// The block's input [rows, hidden] -> a.projected, the attention's term of the residual stream. Writes the rows' keys
// and values to this block's caches.
template <typename T>
void attention_half(const StackShape& s, const StackLayer<T>& layer, const StackStep<T>& step, const T* input,
                    T* k_cache, T* v_cache, Activations<T>& a, int threads) {
  const int64_t rows = step.rows, hidden = s.hidden, half = s.head_dim / 2;
  const int64_t q_width = s.query_heads * s.head_dim, kv_width = s.kv_heads * s.head_dim;
  const int64_t qkv_width = q_width + 2 * kv_width;
  const AttentionShape attention{rows,    s.query_heads, s.kv_heads, s.head_dim, q_width,
                                 kv_width, kv_width,     s.scale,    threads};
  project(s, input, layer.qkv, layer.qkv_bias, a.qkv, rows, qkv_width, hidden, s.hidden_groups, threads);
  over_rows(rows, qkv_width, threads, [&](int64_t first, int64_t count) {
    const T *qkv = a.qkv + first * qkv_width, *v = qkv + q_width + kv_width;
    T* k = a.k + first * kv_width;
    split_qkv(qkv, qkv_width, a.cos + first * half, a.sin + first * half, layer.q_norm, layer.k_norm, s.eps,
              a.q + first * q_width, k, count, s.query_heads, s.kv_heads, s.head_dim);
    write_kv(k, kv_width, v, qkv_width, k_cache, v_cache, step.kv_slots + first, count, kv_width,
             step.pages.cache_slots);
  });
  paged_attention<T>(a.q, k_cache, v_cache, step.pages, step.query_offsets, step.tree_mask, step.tree_width,
                     a.attended, attention);
  project(s, a.attended, layer.o, layer.o_bias, a.projected, rows, hidden, q_width, s.query_groups, threads);
}

// a.stream += a.projected; then the norm of the sum, for the next operation.
template <typename T>
void add_and_norm(const StackShape& s, int64_t rows, const T* norm, T* target, Activations<T>& a, int threads) {
  over_rows(rows, s.hidden, threads, [&](int64_t first, int64_t count) {
    T* stream = a.stream + first * s.hidden;
    add_rms_norm(a.projected + first * s.hidden, stream, norm, target + first * s.hidden, stream, count, s.hidden,
                 s.eps);
  });
}

// a.normed -> a.projected, the MLP's term of the residual stream.
template <typename T>
void mlp_half(const StackShape& s, const StackLayer<T>& layer, int64_t rows, Activations<T>& a, int threads) {
  project(s, a.normed, layer.gate_up, layer.gate_up_bias, a.gate_up, rows, 2 * s.intermediate, s.hidden, s.hidden_groups,
          threads);
  swiglu(a.gate_up, a.activated, rows, s.intermediate, threads);
  project(s, a.activated, layer.down, layer.down_bias, a.projected, rows, s.hidden, s.intermediate, s.inner_groups, threads);
}

}  // namespace paceline
