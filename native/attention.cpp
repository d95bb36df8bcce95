// Causal attention for packed segments (learner) and for a paged KV cache (engine), and the backward of the first.
//
// Invariant: the result of one query row and head depends on its query and on the list of keys and values that it may
// see, in order of position; on nothing else. Both entry points, every chunk size, and tree masks (which only shorten
// that list) go through `attend`, so a cached row equals a packed row bitwise.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace paceline {
namespace {

constexpr int64_t kRowsPerTask = 32;

struct Task {
  int64_t segment, kv_head, first_row, last_row;  // rows [first, last) of the segment's queries
};

// Where the keys and values of one head lie, and which of them (element offset = place[j] * stride) a row may see.
template <typename T>
struct Keys {
  const T *k, *v;
  int64_t k_stride, v_stride, head_dim;
  const int32_t* place;
};

// Adds neighbouring lanes: of a and b, the layout of AVX hadd.
inline f32x8 add_pairs(f32x8 a, f32x8 b) {
  return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

// The sums of eight vectors, as one vector.
inline f32x8 sum_each(const f32x8 x[kLanes]) {
  f32x8 low = add_pairs(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
  f32x8 high = add_pairs(add_pairs(x[4], x[5]), add_pairs(x[6], x[7]));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

// out[j] = query . row(place[j]) for j < n, eight at a time; places past n repeat the last one.
template <typename T, typename Q>
void dots(const Q* query, const T* base, int64_t stride, const int32_t* place, int64_t n, int64_t head_dim,
          float* out) {
  for (int64_t j = 0; j < n; j += kLanes) {
    const T* rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) rows[lane] = base + place[std::min(j + lane, n - 1)] * stride;
    f32x8 sums[kLanes] = {};
    for (int64_t at = 0; at < head_dim; at += kLanes) {
      f32x8 part = load(query + at);
#pragma GCC unroll 8
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] = fma(part, load(rows[lane] + at), sums[lane]);
    }
    store(out + j, sum_each(sums));
  }
}

// out[0 : 8 * kVectors] = sum over j of weight[j] * row(place[j]); even and odd j are summed apart.
template <int kVectors, typename T>
void weighted_columns(const float* weight, const T* base, int64_t stride, const int32_t* place, int64_t n,
                      float* out) {
  f32x8 even[kVectors] = {}, odd[kVectors] = {};
  int64_t j = 0;
  for (; j + 1 < n; j += 2) {
    const T *a = base + place[j] * stride, *b = base + place[j + 1] * stride;
    f32x8 wa = splat(weight[j]), wb = splat(weight[j + 1]);
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      even[c] = fma(wa, load(a + c * kLanes), even[c]);
      odd[c] = fma(wb, load(b + c * kLanes), odd[c]);
    }
  }
  if (j < n) {
    const T* a = base + place[j] * stride;
    f32x8 wa = splat(weight[j]);
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) even[c] = fma(wa, load(a + c * kLanes), even[c]);
  }
  for (int c = 0; c < kVectors; ++c) store(out + c * kLanes, even[c] + odd[c]);
}

template <typename T>
void weighted_sum(const float* weight, const T* base, int64_t stride, const int32_t* place, int64_t n,
                  int64_t head_dim, float* out) {
  int64_t at = 0;
  for (; at + 4 * kLanes <= head_dim; at += 4 * kLanes)
    weighted_columns<4>(weight, base + at, stride, place, n, out + at);
  for (; at < head_dim; at += kLanes) weighted_columns<1>(weight, base + at, stride, place, n, out + at);
}

// weight[j] = exp(scale q.k_j - max), zero in the lanes past n; returns their sum.
template <typename T>
float softmax_weights(const T* query, const Keys<T>& keys, int64_t n, float scale, float* weight) {
  dots(query, keys.k, keys.k_stride, keys.place, n, keys.head_dim, weight);
  const f32x8 minus_infinity = splat(-std::numeric_limits<float>::infinity());
  f32x8 best = minus_infinity;
  int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t j = n; j < padded; ++j) weight[j] = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < padded; j += kLanes) {
    f32x8 score = load(weight + j) * scale;
    store(weight + j, score);
    best = max(score, best);
  }
  float top = largest(best);
  f32x8 total = {};
  for (int64_t j = 0; j < padded; j += kLanes) {
    f32x8 e = exp(load(weight + j) - top);
    store(weight + j, e);
    total += e;
  }
  return sum(total);
}

struct Scratch {
  std::vector<float> weight, d_weight, columns, d_keys, d_values;
  std::vector<int32_t> place;

  void reserve(int64_t keys, int64_t head_dim) {
    weight.resize(keys + kLanes);
    d_weight.resize(keys + kLanes);
    columns.resize(head_dim);
    place.resize(keys);
  }
};

Scratch& scratch_of_thread() {
  static thread_local Scratch scratch;
  return scratch;
}

// One query row of one head over its first n keys. The whole of the invariant: nothing else enters.
template <typename T>
void attend(const T* query, const Keys<T>& keys, int64_t n, float scale, Scratch& scratch, T* out) {
  float* weight = scratch.weight.data();
  float total = softmax_weights(query, keys, n, scale, weight);
  weighted_sum(weight, keys.v, keys.v_stride, keys.place, n, keys.head_dim, scratch.columns.data());
  for (int64_t at = 0; at < keys.head_dim; at += kLanes) store(out + at, load(scratch.columns.data() + at) / total);
}

// Row blocks of every (segment, kv head); `offsets` cut the query rows.
std::vector<Task> tasks_of(const int32_t* offsets, int64_t segments, int64_t kv_heads, int64_t rows_per_task) {
  std::vector<Task> tasks;
  for (int64_t segment = 0; segment < segments; ++segment) {
    int64_t rows = offsets[segment + 1] - offsets[segment];
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t row = 0; row < rows; row += rows_per_task)
        tasks.push_back({segment, head, row, std::min(rows, row + rows_per_task)});
  }
  return tasks;
}

void check_offsets(const int32_t* offsets, int64_t segments, int64_t rows, const char* name) {
  bool good = offsets[0] == 0 && offsets[segments] == rows;
  for (int64_t i = 0; i < segments; ++i) good = good && offsets[i] <= offsets[i + 1];
  if (!good)
    throw std::invalid_argument(std::string(name) + " must start at 0, never decrease and end at the number of rows, " +
                                std::to_string(rows));
}

template <typename Function>
void for_each(const std::vector<Task>& tasks, int threads, Function run) {
  int64_t count = static_cast<int64_t>(tasks.size());
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1 && count > 1)
  for (int64_t i = 0; i < count; ++i) run(tasks[i]);
}

}  // namespace

template <typename T>
void packed_attention(const T* q, const T* k, const T* v, const int32_t* offsets, int64_t segments, T* out,
                      const AttentionShape& shape) {
  check_offsets(offsets, segments, shape.rows, "cu_seqlens");
  const int64_t group = shape.query_heads / shape.kv_heads, width = shape.head_dim;
  for_each(tasks_of(offsets, segments, shape.kv_heads, kRowsPerTask), shape.threads, [&](const Task& task) {
    int64_t start = offsets[task.segment];
    Scratch& scratch = scratch_of_thread();
    scratch.reserve(task.last_row, width);
    for (int64_t j = 0; j < task.last_row; ++j) scratch.place[j] = static_cast<int32_t>(start + j);
    Keys<T> keys{k + task.kv_head * width, v + task.kv_head * width, shape.k_stride, shape.v_stride, width,
                 scratch.place.data()};
    for (int64_t row = task.first_row; row < task.last_row; ++row)
      for (int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head)
        attend(q + (start + row) * shape.q_stride + head * width, keys, row + 1, shape.scale, scratch,
               out + ((start + row) * shape.query_heads + head) * width);
  });
}

// With p = softmax(s), s = scale q.k: dv_j += p_j do; ds = p (do.v_j - sum_j p_j do.v_j); dq = scale sum ds_j k_j;
// dk_j += scale ds_j q. One task owns all rows of a (segment, kv head), so every sum has one order.
template <typename T>
void packed_attention_backward(const T* grad, const T* q, const T* k, const T* v, const int32_t* offsets,
                               int64_t segments, T* grad_q, T* grad_k, T* grad_v, const AttentionShape& shape) {
  check_offsets(offsets, segments, shape.rows, "cu_seqlens");
  const int64_t group = shape.query_heads / shape.kv_heads, width = shape.head_dim;
  const int64_t whole = std::numeric_limits<int32_t>::max();
  for_each(tasks_of(offsets, segments, shape.kv_heads, whole), shape.threads, [&](const Task& task) {
    int64_t start = offsets[task.segment], rows = task.last_row;
    Scratch& scratch = scratch_of_thread();
    scratch.reserve(rows, width);
    scratch.d_keys.assign(rows * width, 0.0f);
    scratch.d_values.assign(rows * width, 0.0f);
    for (int64_t j = 0; j < rows; ++j) scratch.place[j] = static_cast<int32_t>(start + j);
    Keys<T> keys{k + task.kv_head * width, v + task.kv_head * width, shape.k_stride, shape.v_stride, width,
                 scratch.place.data()};
    float *weight = scratch.weight.data(), *d_weight = scratch.d_weight.data(), *columns = scratch.columns.data();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head) {
        const T* query = q + (start + row) * shape.q_stride + head * width;
        const T* d_out = grad + ((start + row) * shape.query_heads + head) * width;
        int64_t n = row + 1, padded = (n + kLanes - 1) / kLanes * kLanes;
        float total = softmax_weights(query, keys, n, shape.scale, weight);
        dots(d_out, keys.v, keys.v_stride, keys.place, n, width, d_weight);
        f32x8 dot = {};
        for (int64_t j = 0; j < padded; j += kLanes) {
          f32x8 p = load(weight + j) / total;
          store(weight + j, p);
          dot = fma(p, load(d_weight + j), dot);
        }
        float mean = sum(dot);
        for (int64_t j = 0; j < padded; j += kLanes)
          store(d_weight + j, load(weight + j) * (load(d_weight + j) - mean) * shape.scale);
        weighted_sum(d_weight, keys.k, keys.k_stride, keys.place, n, width, columns);
        T* d_query = grad_q + ((start + row) * shape.query_heads + head) * width;
        for (int64_t at = 0; at < width; at += kLanes) store(d_query + at, load(columns + at));
        for (int64_t j = 0; j < n; ++j) {
          float *d_key = scratch.d_keys.data() + j * width, *d_value = scratch.d_values.data() + j * width;
          f32x8 ds = splat(d_weight[j]), p = splat(weight[j]);
          for (int64_t at = 0; at < width; at += kLanes) {
            store(d_key + at, fma(ds, load(query + at), load(d_key + at)));
            store(d_value + at, fma(p, load(d_out + at), load(d_value + at)));
          }
        }
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      int64_t target = ((start + row) * shape.kv_heads + task.kv_head) * width;
      for (int64_t at = 0; at < width; at += kLanes) {
        store(grad_k + target + at, load(scratch.d_keys.data() + row * width + at));
        store(grad_v + target + at, load(scratch.d_values.data() + row * width + at));
      }
    }
  });
}

template <typename T>
void paged_attention(const T* q, const T* k_cache, const T* v_cache, const PageTable& pages,
                     const int32_t* query_offsets, const uint8_t* tree_mask, int64_t tree_width, T* out,
                     const AttentionShape& shape) {
  check_offsets(query_offsets, pages.requests, shape.rows, "query_offsets");
  pages.check(query_offsets, tree_mask == nullptr ? std::numeric_limits<int64_t>::max() : tree_width);
  const int64_t group = shape.query_heads / shape.kv_heads, width = shape.head_dim;
  for_each(tasks_of(query_offsets, pages.requests, shape.kv_heads, kRowsPerTask), shape.threads, [&](const Task& task) {
    int64_t start = query_offsets[task.segment], queries = query_offsets[task.segment + 1] - start;
    int64_t before = pages.context_lens[task.segment] - queries;  // context tokens ahead of the first query row
    Scratch& scratch = scratch_of_thread();
    scratch.reserve(before + queries, width);
    int32_t* place = scratch.place.data();
    int64_t known = tree_mask == nullptr ? before + task.last_row : before;
    pages.slots(task.segment, 0, known, place);
    Keys<T> keys{k_cache + task.kv_head * width, v_cache + task.kv_head * width, shape.k_stride, shape.v_stride, width,
                 place};
    for (int64_t row = task.first_row; row < task.last_row; ++row) {
      int64_t n = before + row + 1;
      if (tree_mask != nullptr) {
        n = before;
        for (int64_t column = 0; column < queries; ++column)
          if (tree_mask[(start + row) * tree_width + column])
            pages.slots(task.segment, before + column, before + column + 1, place + n++);
      }
      for (int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head)
        attend(q + (start + row) * shape.q_stride + head * width, keys, n, shape.scale, scratch,
               out + ((start + row) * shape.query_heads + head) * width);
    }
  });
}

void PageTable::slots(int64_t request, int64_t first, int64_t last, int32_t* out) const {
  const int32_t* blocks = block_tables + request * table_width;
  for (int64_t position = first; position < last;) {
    int64_t block = position / block_tokens, offset = position % block_tokens;
    int64_t base = blocks[block] * block_tokens;
    for (; offset < block_tokens && position < last; ++offset, ++position) *out++ = static_cast<int32_t>(base + offset);
  }
}

void PageTable::check(const int32_t* query_offsets, int64_t max_queries) const {
  for (int64_t request = 0; request < requests; ++request) {
    int64_t queries = query_offsets[request + 1] - query_offsets[request], context = context_lens[request];
    int64_t blocks = (context + block_tokens - 1) / block_tokens;
    auto who = [&] { return "request " + std::to_string(request) + ": "; };
    if (queries > context || context < 0)
      throw std::invalid_argument(who() + std::to_string(queries) + " query rows, but a context of " +
                                  std::to_string(context) + " tokens, which includes them");
    if (queries > max_queries) throw std::invalid_argument(who() + "more query rows than tree_mask has columns");
    if (blocks > table_width)
      throw std::invalid_argument(who() + "context of " + std::to_string(context) + " tokens exceeds its block table");
    for (int64_t i = 0; i < blocks; ++i) {
      int64_t block = block_tables[request * table_width + i];
      if (block < 0 || (block + 1) * block_tokens > cache_slots)
        throw std::out_of_range(who() + "block " + std::to_string(block) + " lies outside the KV cache");
    }
  }
}

#define INSTANTIATE(T)                                                                                                 \
  template void packed_attention(const T*, const T*, const T*, const int32_t*, int64_t, T*, const AttentionShape&);    \
  template void packed_attention_backward(const T*, const T*, const T*, const T*, const int32_t*, int64_t, T*, T*, T*, \
                                          const AttentionShape&);                                                      \
  template void paged_attention(const T*, const T*, const T*, const PageTable&, const int32_t*, const uint8_t*,        \
                                int64_t, T*, const AttentionShape&);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace paceline
