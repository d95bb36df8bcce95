// Causal attention for packed segments (learner) and for a paged KV cache (engine), and the backward of the first.
//
// Invariant: the result of one query row and head depends only on its query and on its visible keys and values, in
// order of position. Both entry points, every chunk size, and tree masks (which only shorten that list) go through
// `attend`, so a cached row equals a packed row bitwise.
#include "attention.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_lanes.h"
#include "cpu.h"
#include "kernels.h"

namespace paceline {
namespace {

constexpr int64_t kRowsPerTask = 32;
constexpr int64_t kRowsTogether = 8;  // query rows of a request that read its keys together

struct Task {
  int64_t segment, kv_head, kv_heads, first_row, last_row;  // rows [first, last) of the segment's queries
};

struct Scratch {
  std::vector<float> weight, d_weight, columns, d_keys, d_values;
  std::vector<int32_t> place, next_place, own;

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

// Attends with the heads of `kv_heads` key heads. The invariant holds because nothing else enters. The scratch has the
// places of the keys, with room for own ones behind the shared ones.
template <typename T>
void attend(const Queries<T>& queries, const Keys<T>& keys, int64_t kv_heads, float scale, const Keys<T>& next,
            int64_t next_keys, Scratch& scratch, T* out) {
  const int64_t width = keys.head_dim;
#if defined(PACELINE_AVX512)
  if (has_avx512()) {
    const int64_t most = queries.shared + queries.most_own;
    scratch.weight.resize(avx512::scratch_floats(kv_heads * queries.rows * queries.group, most, width));
    return avx512::attend(queries, keys, kv_heads, scale, next, next_keys, scratch.weight.data(), out);
  }
#endif
  (void)next, (void)next_keys;
  float *weight = scratch.weight.data(), *columns = scratch.columns.data();
  int32_t* behind = scratch.place.data() + queries.shared;
  for (int64_t row = 0; row < queries.rows; ++row) {
    const int32_t* own = queries.own + row * queries.own_stride;
    if (own != behind) std::copy(own, own + queries.own_count[row], behind);
    const int64_t n = queries.shared + queries.own_count[row];
    for (int64_t head = 0; head < kv_heads * queries.group; ++head) {
      Keys<T> one = keys;
      one.k += head / queries.group * width, one.v += head / queries.group * width;
      float total = softmax_weights(queries.q + row * queries.q_stride + head * width, one, n, scale, weight);
      weighted_sum(weight, one.v, one.v_stride, one.places, n, width, columns);
      T* to = out + row * queries.out_stride + head * width;
      for (int64_t at = 0; at < width; at += kLanes) store(to + at, load(columns + at) / total);
    }
  }
}

constexpr int64_t kCounting[kRowsTogether] = {0, 1, 2, 3, 4, 5, 6, 7};

// Rows [first, last) of a chain: row r sees the first `before` + r + 1 of the keys.
template <typename T>
void attend_chain(const T* q, int64_t q_stride, int64_t group, const Keys<T>& keys, int64_t kv_heads, int64_t before,
                  int64_t first, int64_t last, float scale, const Keys<T>& next, int64_t next_keys, Scratch& scratch,
                  T* out, int64_t out_stride) {
  for (int64_t row = first; row < last; row += kRowsTogether) {
    const int64_t rows = std::min(kRowsTogether, last - row), shared = before + row + 1;
    Queries<T> queries{q + row * q_stride, q_stride, out_stride, rows, group, shared, rows - 1,
                       keys.places.row + shared, 0, kCounting};
    attend(queries, keys, kv_heads, scale, next, row + rows < last ? 0 : next_keys, scratch, out + row * out_stride);
  }
}

// Row blocks of every (segment, kv head); `offsets` divide the query rows. Segments of few rows, as steps of decoding
// have, are not divided, and `heads` key heads of theirs are one task.
std::vector<Task> tasks_of(const int32_t* offsets, int64_t segments, int64_t kv_heads, int64_t rows_per_task,
                           int64_t heads = 1) {
  std::vector<Task> tasks;
  for (int64_t segment = 0; segment < segments; ++segment) {
    int64_t rows = offsets[segment + 1] - offsets[segment], together = rows <= rows_per_task ? heads : 1;
    for (int64_t head = 0; head < kv_heads; head += together)
      for (int64_t row = 0; row < rows; row += rows_per_task)
        tasks.push_back({segment, head, std::min(together, kv_heads - head), row, std::min(rows, row + rows_per_task)});
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

// The tree of packed segments: segment s continues parents[s], an earlier one, or begins a sequence (-1, or no
// parents). Segments are in depth-first order: all descendants of a segment follow it without a gap.
class Forest {
 public:
  Forest(const PackedSegments& segments, int64_t rows)
      : offsets_(segments.offsets), parents_(segments.parents), before_(segments.count), end_(segments.count) {
    check_offsets(offsets_, count(), rows, "cu_seqlens");
    for (int64_t s = 0; s < count(); ++s) {
      int64_t last = s - 1;  // candidate parents of s: the segment before it and that one's ancestors
      while (last >= 0 && last != parent(s)) last = parent(last);
      if (last != parent(s))
        throw std::invalid_argument("parents: segment " + std::to_string(s) + " continues segment " +
                                    std::to_string(parent(s)) + ", which is not in depth-first order");
      before_[s] = last < 0 ? 0 : before_[last] + rows_of(last);
    }
    for (int64_t s = count() - 1; s >= 0; --s) {
      end_[s] = std::max(end_[s], s + 1);
      if (parent(s) >= 0) end_[parent(s)] = std::max(end_[parent(s)], end_[s]);
    }
  }

  int64_t count() const { return static_cast<int64_t>(before_.size()); }
  int64_t parent(int64_t s) const { return parents_ == nullptr ? -1 : parents_[s]; }
  int64_t start(int64_t s) const { return offsets_[s]; }
  int64_t rows_of(int64_t s) const { return offsets_[s + 1] - offsets_[s]; }
  int64_t before(int64_t s) const { return before_[s]; }  // rows of all its ancestors
  int64_t end(int64_t s) const { return end_[s]; }        // behind its last descendant

  // The rows that row `rows - 1` of segment s may see, in order of position.
  void places(int64_t s, int64_t rows, int32_t* out) const {
    std::iota(out + before_[s], out + before_[s] + rows, static_cast<int32_t>(start(s)));
    for (int64_t p = parent(s); p >= 0; p = parent(p))
      std::iota(out + before_[p], out + before_[p] + rows_of(p), static_cast<int32_t>(start(p)));
  }

 private:
  const int32_t *offsets_, *parents_;
  std::vector<int64_t> before_, end_;
};

template <typename T>
void packed_attention(const T* q, const T* k, const T* v, const PackedSegments& segments, T* out,
                      const AttentionShape& shape) {
  const Forest forest(segments, shape.rows);
  const int64_t group = shape.query_heads / shape.kv_heads, width = shape.head_dim;
  for_each(tasks_of(segments.offsets, segments.count, shape.kv_heads, kRowsPerTask), shape.threads, [&](const Task& task) {
    int64_t start = forest.start(task.segment), before = forest.before(task.segment);
    Scratch& scratch = scratch_of_thread();
    scratch.reserve(before + task.last_row, width);
    forest.places(task.segment, task.last_row, scratch.place.data());
    Keys<T> keys{k + task.kv_head * width, v + task.kv_head * width, shape.k_stride, shape.v_stride, width,
                 {scratch.place.data(), before == 0}};
    const int64_t head = task.kv_head * group;
    attend_chain(q + start * shape.q_stride + head * width, shape.q_stride, group, keys, 1, before, task.first_row,
                 task.last_row, shape.scale, {}, 0, scratch, out + (start * shape.query_heads + head) * width,
                 shape.query_heads * width);
  });
}

// Gradients of the keys and values that one unit's segments may see: first those of their ancestors, then their own.
// Takes kTile query rows and heads at a time, so that each gradient of a key or value is read and written once per
// tile. Every sum has one order: queries rising, heads inside a query.
template <typename T>
class Backward {
 public:
  Backward(const AttentionShape& shape, int64_t rows, Scratch& scratch) : shape_(shape), scratch_(scratch) {
    scratch.d_keys.assign(rows * shape.head_dim, 0.0f);
    scratch.d_values.assign(rows * shape.head_dim, 0.0f);
  }

  // The following queries see the first of `rows` keys; key j's gradient has the number `into[j]`.
  void begin(const Keys<T>& keys, const int32_t* into, int64_t rows) {
    keys_ = keys, into_ = into, padded_ = (rows + kLanes - 1) / kLanes * kLanes;
    scratch_.weight.resize(kTile * padded_);
    scratch_.d_weight.resize(kTile * padded_);
  }

  // With p = softmax(s), s = scale q.k: ds = p (do.v - sum p do.v), dq = scale sum ds_j k_j.
  void query(const T* query, const T* d_out, int64_t n, T* d_query) {
    float *weight = scratch_.weight.data() + used_ * padded_, *d_weight = scratch_.d_weight.data() + used_ * padded_;
    float total = softmax_weights(query, keys_, n, shape_.scale, weight);
    dots(d_out, keys_.v, keys_.v_stride, keys_.places, n, keys_.head_dim, d_weight);
    int64_t lanes = (n + kLanes - 1) / kLanes * kLanes;
    f32x8 dot = {};
    for (int64_t j = 0; j < lanes; j += kLanes) {
      f32x8 p = load(weight + j) / total;
      store(weight + j, p);
      dot = fma(p, load(d_weight + j), dot);
    }
    float mean = sum(dot);
    for (int64_t j = 0; j < lanes; j += kLanes)
      store(d_weight + j, load(weight + j) * (load(d_weight + j) - mean) * shape_.scale);
    std::fill(weight + lanes, weight + padded_, 0.0f);  // later rows of the tile see more keys
    std::fill(d_weight + lanes, d_weight + padded_, 0.0f);
    float* columns = scratch_.columns.data();
    weighted_sum(d_weight, keys_.k, keys_.k_stride, keys_.places, n, keys_.head_dim, columns);
    for (int64_t at = 0; at < keys_.head_dim; at += kLanes) store(d_query + at, load(columns + at));
    queries_[used_] = query, d_outs_[used_] = d_out;
    if (++used_ == kTile) flush(n);
  }

  // dk_j += ds_j q and dv_j += p_j do of the tile's queries, over the first n keys.
  void flush(int64_t n) {
    if (used_ == kTile)
      add<kTile>(n);
    else
      for (int i = 0; i < used_; ++i) add<1>(n, i);
    used_ = 0;
  }

 private:
  static constexpr int kTile = 4;

  template <int kCount>
  void add(int64_t n, int first = 0) {
    const int64_t width = keys_.head_dim;
    for (int64_t at = 0; at < width; at += kLanes) {
      f32x8 q[kCount], d[kCount];
      for (int i = 0; i < kCount; ++i) q[i] = load(queries_[first + i] + at), d[i] = load(d_outs_[first + i] + at);
      float *d_keys = scratch_.d_keys.data() + at, *d_values = scratch_.d_values.data() + at;
      const float *weight = scratch_.weight.data() + first * padded_, *ds = scratch_.d_weight.data() + first * padded_;
      for (int64_t j = 0; j < n; ++j) {
        float *d_key = d_keys + into_[j] * width, *d_value = d_values + into_[j] * width;
        f32x8 for_key = load(d_key), for_value = load(d_value);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          for_key = fma(splat(ds[i * padded_ + j]), q[i], for_key);
          for_value = fma(splat(weight[i * padded_ + j]), d[i], for_value);
        }
        store(d_key, for_key);
        store(d_value, for_value);
      }
    }
  }

  const AttentionShape& shape_;
  Keys<T> keys_{};
  const int32_t* into_ = nullptr;
  int64_t padded_ = 0;
  Scratch& scratch_;
  const T *queries_[kTile], *d_outs_[kTile];
  int used_ = 0;
};

// Segments [first, last) whose gradients one task computes. A trunk is a segment with many descendants: the gradients
// of its keys and values are sums over units, and each unit's part is kept until all have finished.
struct Unit {
  int64_t first, last;
  bool trunk;
};

constexpr int64_t kTrunkShare = 8;  // a trunk and its descendants have more than one in kTrunkShare of all rows

std::vector<Unit> units_of(const Forest& forest, int64_t rows) {
  std::vector<Unit> units;
  for (int64_t s = 0; s < forest.count();) {
    int64_t end = forest.end(s), below = forest.start(end - 1) + forest.rows_of(end - 1) - forest.start(s);
    bool trunk = end > s + 1 && below * kTrunkShare > rows;
    units.push_back({s, trunk ? s + 1 : end, trunk});
    s = units.back().last;
  }
  return units;
}

template <typename T>
void packed_attention_backward(const T* grad, const T* q, const T* k, const T* v, const PackedSegments& segments,
                               T* grad_q, T* grad_k, T* grad_v, const AttentionShape& shape) {
  const Forest forest(segments, shape.rows);
  const int64_t group = shape.query_heads / shape.kv_heads, width = shape.head_dim;
  const std::vector<Unit> units = units_of(forest, shape.rows);
  const int64_t count = static_cast<int64_t>(units.size());
  std::vector<std::vector<float>> kept(2 * count * shape.kv_heads);  // of keys, then of values, from position 0 on
  auto kept_of = [&](int64_t unit, int64_t kv_head, int of) -> std::vector<float>& {
    return kept[(unit * shape.kv_heads + kv_head) * 2 + of];
  };
  auto store_rows = [&](const float* from, int64_t row, int64_t kv_head, T* to) {
    to += (row * shape.kv_heads + kv_head) * width;
    for (int64_t at = 0; at < width; at += kLanes) store(to + at, load(from + at));
  };
  std::vector<Task> tasks;
  for (int64_t unit = 0; unit < count; ++unit)
    for (int64_t head = 0; head < shape.kv_heads; ++head) tasks.push_back({unit, head, 1, 0, 0});
  for_each(tasks, shape.threads, [&](const Task& task) {
    const Unit& unit = units[task.segment];
    const int64_t first_row = forest.start(unit.first), shared = forest.before(unit.first);
    const int64_t rows = forest.start(unit.last - 1) + forest.rows_of(unit.last - 1) - first_row;
    Scratch& scratch = scratch_of_thread();
    Backward<T> backward(shape, shared + rows, scratch);
    for (int64_t s = unit.first; s < unit.last; ++s) {
      const int64_t start = forest.start(s), before = forest.before(s), own = forest.rows_of(s);
      scratch.reserve(before + own, width);
      forest.places(s, own, scratch.place.data());
      scratch.next_place.resize(before + own);
      for (int64_t j = 0; j < before + own; ++j)
        scratch.next_place[j] = static_cast<int32_t>(j < shared ? j : shared + scratch.place[j] - first_row);
      Keys<T> keys{k + task.kv_head * width, v + task.kv_head * width, shape.k_stride, shape.v_stride, width,
                   {scratch.place.data(), before == 0}};
      backward.begin(keys, scratch.next_place.data(), before + own);
      for (int64_t row = 0; row < own; ++row)
        for (int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head) {
          int64_t at = ((start + row) * shape.query_heads + head) * width;
          backward.query(q + (start + row) * shape.q_stride + head * width, grad + at, before + row + 1, grad_q + at);
        }
      backward.flush(before + own);
    }
    const int64_t keep = (shared + (unit.trunk ? rows : 0)) * width;
    kept_of(task.segment, task.kv_head, 0).assign(scratch.d_keys.begin(), scratch.d_keys.begin() + keep);
    kept_of(task.segment, task.kv_head, 1).assign(scratch.d_values.begin(), scratch.d_values.begin() + keep);
    for (int64_t row = 0; row < rows && !unit.trunk; ++row) {
      store_rows(scratch.d_keys.data() + (shared + row) * width, first_row + row, task.kv_head, grad_k);
      store_rows(scratch.d_values.data() + (shared + row) * width, first_row + row, task.kv_head, grad_v);
    }
  });
  tasks.erase(std::remove_if(tasks.begin(), tasks.end(), [&](const Task& t) { return !units[t.segment].trunk; }),
              tasks.end());
  for_each(tasks, shape.threads, [&](const Task& task) {
    const int64_t s = units[task.segment].first, first = forest.before(s) * width, size = forest.rows_of(s) * width;
    for (int of = 0; of < 2; ++of) {
      float* sums = kept_of(task.segment, task.kv_head, of).data() + first;
      for (int64_t unit = task.segment + 1; unit < count && units[unit].first < forest.end(s); ++unit) {
        const float* more = kept_of(unit, task.kv_head, of).data() + first;
        for (int64_t at = 0; at < size; at += kLanes) store(sums + at, load(sums + at) + load(more + at));
      }
      for (int64_t row = 0; row < forest.rows_of(s); ++row)
        store_rows(sums + row * width, forest.start(s) + row, task.kv_head, of == 0 ? grad_k : grad_v);
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
  // All heads of a request together read its keys as they lie in memory; fewer, where a thread would have no work.
  const int64_t tasks_wanted = shape.threads > 1 ? 2 * shape.threads : 1;
  const int64_t parts = (tasks_wanted + pages.requests - 1) / std::max<int64_t>(pages.requests, 1);
  const int64_t heads = std::max<int64_t>(shape.kv_heads / std::max<int64_t>(parts, 1), 1);
  const std::vector<Task> tasks = tasks_of(query_offsets, pages.requests, shape.kv_heads, kRowsPerTask, heads);
  for_each(tasks, shape.threads, [&](const Task& task) {
    int64_t start = query_offsets[task.segment], queries = query_offsets[task.segment + 1] - start;
    int64_t before = pages.context_lens[task.segment] - queries;  // context tokens before the first query row
    Scratch& scratch = scratch_of_thread();
    scratch.reserve(before + queries, width);
    pages.slots(task.segment, 0, before + task.last_row, scratch.place.data());
    auto keys_of = [&](const Task& of, const int32_t* place, bool runs) {
      return Keys<T>{k_cache + of.kv_head * width, v_cache + of.kv_head * width, shape.k_stride, shape.v_stride, width,
                     {place, runs}};
    };
    const Keys<T> keys = keys_of(task, scratch.place.data(), tree_mask == nullptr && pages.block_tokens % kLanes == 0);
    // This thread's next task, if every task takes as long.
    const Task* following = &task + std::max(1, shape.threads);
    Keys<T> next{};
    int64_t next_keys = 0;
    if (following < tasks.data() + tasks.size() && following->first_row == 0) {
      next_keys = std::min<int64_t>(pages.context_lens[following->segment], kKeysTogether);
      scratch.next_place.resize(kKeysTogether);
      pages.slots(following->segment, 0, next_keys, scratch.next_place.data());
      next = keys_of(*following, scratch.next_place.data(), false);
    }
    const int64_t head = task.kv_head * group, out_stride = shape.query_heads * width;
    const T* rows = q + start * shape.q_stride + head * width;
    T* to = out + start * out_stride + head * width;
    if (tree_mask == nullptr)
      return attend_chain(rows, shape.q_stride, group, keys, task.kv_heads, before, task.first_row, task.last_row,
                          shape.scale, next, next_keys, scratch, to, out_stride);
    scratch.own.resize(kRowsTogether * queries);
    for (int64_t row = task.first_row; row < task.last_row; row += kRowsTogether) {
      const int64_t count = std::min(kRowsTogether, task.last_row - row);
      int64_t own_count[kRowsTogether] = {};
      for (int64_t r = 0; r < count; ++r)
        for (int64_t column = 0; column < queries; ++column)
          if (tree_mask[(start + row + r) * tree_width + column])
            pages.slots(task.segment, before + column, before + column + 1,
                        scratch.own.data() + r * queries + own_count[r]++);
      Queries<T> some{rows + row * shape.q_stride, shape.q_stride, out_stride, count, group, before,
                      *std::max_element(own_count, own_count + count), scratch.own.data(), queries, own_count};
      attend(some, keys, task.kv_heads, shape.scale, next, row + count < task.last_row ? 0 : next_keys, scratch,
             to + row * out_stride);
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
  template void packed_attention(const T*, const T*, const T*, const PackedSegments&, T*, const AttentionShape&);      \
  template void packed_attention_backward(const T*, const T*, const T*, const T*, const PackedSegments&, T*, T*, T*,   \
                                          const AttentionShape&);                                                      \
  template void paged_attention(const T*, const T*, const T*, const PageTable&, const int32_t*, const uint8_t*,        \
                                int64_t, T*, const AttentionShape&);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace paceline
