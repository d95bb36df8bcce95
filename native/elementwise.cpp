// RMS norm, SwiGLU, rotary embedding, and writing the KV cache: the operations on one token at a time.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace paceline {
namespace {

constexpr int64_t kParallelElements = 1 << 15;  // with fewer, a second thread costs more than it gives

int tail(int64_t width, int64_t at) { return width - at < kLanes ? static_cast<int>(width - at) : kLanes; }

// 1 / sqrt(mean(x^2) + eps). Four sums of eight lanes, so that long rows are not one chain of additions.
template <typename T>
float inverse_rms(const T* x, int64_t width, float eps) {
  f32x8 sums[4] = {};
  for (int64_t at = 0, part = 0; at < width; at += kLanes, part = (part + 1) & 3) {
    f32x8 v = load(x + at, tail(width, at));
    sums[part] = fma(v, v, sums[part]);
  }
  float square = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0f / std::sqrt(square / static_cast<float>(width) + eps);
}

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
  f32x8 inverse = splat(inverse_rms(x, width, eps));
  for (int64_t at = 0; at < width; at += kLanes) {
    int n = tail(width, at);
    store(out + at, load(x + at, n) * inverse * load(weight + at, n), n);
  }
}

template <typename T>
void rope_head(const T* x, const float* cos, const float* sin, T* out, int64_t head_dim, bool inverse) {
  int64_t half = head_dim / 2;
  for (int64_t at = 0; at < half; at += kLanes) {
    int n = tail(half, at);
    f32x8 first = load(x + at, n), second = load(x + half + at, n);
    f32x8 c = load(cos + at, n), s = load(sin + at, n);
    if (inverse) s = -s;
    store(out + at, first * c - second * s, n);
    store(out + half + at, second * c + first * s, n);
  }
}

}  // namespace

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * width > kParallelElements)
  for (int64_t row = 0; row < rows; ++row) norm_row(x + row * width, weight, out + row * width, width, eps);
}

template <typename T>
void add_rms_norm(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t rows, int64_t width,
                  float eps) {
  for (int64_t row = 0; row < rows; ++row) {
    int64_t start = row * width;
    for (int64_t at = 0; at < width; at += kLanes) {
      int n = tail(width, at);
      store(total + start + at, load(x + start + at, n) + load(residual + start + at, n), n);
    }
    norm_row(total + start, weight, out + start, width, eps);
  }
}

// With r = 1/rms(x): dx = r w dy - x r^3 mean(w dy x), dw = sum over rows of dy x r. Sums rows in blocks of 64, then
// blocks in order: the same for any number of threads, with an error that grows with the number of blocks, not of rows.
template <typename T>
void rms_norm_backward(const T* grad, const T* x, const T* weight, T* grad_x, float* grad_weight, int64_t rows,
                       int64_t width, float eps, int threads) {
  constexpr int64_t kBlock = 64;
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
  std::vector<float> sums(blocks * width);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * width > kParallelElements)
  for (int64_t block = 0; block < blocks; ++block) {
    float* block_sum = sums.data() + block * width;
    for (int64_t row = block * kBlock; row < std::min(rows, (block + 1) * kBlock); ++row) {
      const T *dy = grad + row * width, *xr = x + row * width;
      float inverse = inverse_rms(xr, width, eps);
      f32x8 dot = {};
      for (int64_t at = 0; at < width; at += kLanes) {
        int n = tail(width, at);
        dot = fma(load(dy + at, n) * load(weight + at, n), load(xr + at, n), dot);
      }
      f32x8 r = splat(inverse);
      f32x8 pull = splat(inverse * inverse * inverse * (sum(dot) / static_cast<float>(width)));
      for (int64_t at = 0; at < width; at += kLanes) {
        int n = tail(width, at);
        f32x8 d = load(dy + at, n), v = load(xr + at, n);
        store(grad_x + row * width + at, d * load(weight + at, n) * r - v * pull, n);
        store(block_sum + at, load(block_sum + at, n) + d * (v * r), n);
      }
    }
  }
  std::fill(grad_weight, grad_weight + width, 0.0f);
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t at = 0; at < width; ++at) grad_weight[at] += sums[block * width + at];
}

template <typename T>
void swiglu(const T* gate_up, T* out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * width > kParallelElements)
  for (int64_t row = 0; row < rows; ++row) {
    const T *gate = gate_up + row * 2 * width, *up = gate + width;
    for (int64_t at = 0; at < width; at += kLanes) {
      int n = tail(width, at);
      f32x8 g = load(gate + at, n);
      store(out + row * width + at, g / (1.0f + exp(-g)) * load(up + at, n), n);
    }
  }
}

// s = sigmoid(g): d gate = dy u s (1 + g (1 - s)), d up = dy g s.
template <typename T>
void swiglu_backward(const T* grad, const T* gate_up, T* grad_gate_up, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * width > kParallelElements)
  for (int64_t row = 0; row < rows; ++row) {
    const T *gate = gate_up + row * 2 * width, *up = gate + width;
    T *d_gate = grad_gate_up + row * 2 * width, *d_up = d_gate + width;
    for (int64_t at = 0; at < width; at += kLanes) {
      int n = tail(width, at);
      f32x8 g = load(gate + at, n), dy = load(grad + row * width + at, n);
      f32x8 s = 1.0f / (1.0f + exp(-g));
      store(d_gate + at, dy * load(up + at, n) * s * (1.0f + g * (1.0f - s)), n);
      store(d_up + at, dy * (g * s), n);
    }
  }
}

template <typename T>
void rope(const T* x, int64_t x_stride, const float* cos, const float* sin, T* out, int64_t rows, int64_t heads,
          int64_t head_dim, bool inverse, int threads) {
  int64_t half = head_dim / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * heads * head_dim > kParallelElements)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < heads; ++head)
      rope_head(x + row * x_stride + head * head_dim, cos + row * half, sin + row * half,
                out + (row * heads + head) * head_dim, head_dim, inverse);
}

template <typename T>
void split_qkv(const T* qkv, int64_t stride, const float* cos, const float* sin, const T* q_norm, const T* k_norm,
               float eps, T* q, T* k, int64_t rows, int64_t query_heads, int64_t kv_heads, int64_t head_dim) {
  std::vector<T> normed(head_dim);
  int64_t half = head_dim / 2;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < query_heads + kv_heads; ++head) {
      bool is_query = head < query_heads;
      const T* source = qkv + row * stride + head * head_dim;
      const T* weight = is_query ? q_norm : k_norm;
      if (weight != nullptr) {
        norm_row(source, weight, normed.data(), head_dim, eps);
        source = normed.data();
      }
      T* target = is_query ? q + (row * query_heads + head) * head_dim
                           : k + (row * kv_heads + head - query_heads) * head_dim;
      rope_head(source, cos + row * half, sin + row * half, target, head_dim, false);
    }
  }
}

template <typename T>
void write_kv(const T* k, int64_t k_stride, const T* v, int64_t v_stride, T* k_cache, T* v_cache,
              const int64_t* slots, int64_t rows, int64_t width, int64_t cache_slots) {
  for (int64_t row = 0; row < rows; ++row) {
    if (slots[row] < 0 || slots[row] >= cache_slots)
      throw std::out_of_range("row " + std::to_string(row) + ": slot " + std::to_string(slots[row]) +
                              " lies outside the KV cache");
    std::memcpy(k_cache + slots[row] * width, k + row * k_stride, width * sizeof(T));
    std::memcpy(v_cache + slots[row] * width, v + row * v_stride, width * sizeof(T));
  }
}

namespace {
template <f32x8 (*function)(f32x8)>
void map(const float* x, float* out, int64_t n) {
  for (int64_t at = 0; at < n; at += kLanes) store(out + at, function(load(x + at, tail(n, at))), tail(n, at));
}
}  // namespace

void exp_array(const float* x, float* out, int64_t n) { map<exp>(x, out, n); }
void log_array(const float* x, float* out, int64_t n) { map<log>(x, out, n); }
void log1m_array(const float* x, float* out, int64_t n) { map<log1m>(x, out, n); }

#define INSTANTIATE(T)                                                                                                \
  template void rms_norm(const T*, const T*, T*, int64_t, int64_t, float, int);                                            \
  template void add_rms_norm(const T*, const T*, const T*, T*, T*, int64_t, int64_t, float);                          \
  template void rms_norm_backward(const T*, const T*, const T*, T*, float*, int64_t, int64_t, float, int);                 \
  template void swiglu(const T*, T*, int64_t, int64_t, int);                                                               \
  template void swiglu_backward(const T*, const T*, T*, int64_t, int64_t, int);                                            \
  template void rope(const T*, int64_t, const float*, const float*, T*, int64_t, int64_t, int64_t, bool, int);             \
  template void split_qkv(const T*, int64_t, const float*, const float*, const T*, const T*, float, T*, T*, int64_t,  \
                          int64_t, int64_t, int64_t);                                                                 \
  template void write_kv(const T*, int64_t, const T*, int64_t, T*, T*, const int64_t*, int64_t, int64_t, int64_t);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace paceline
