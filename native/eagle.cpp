// The EAGLE drafter's passes: one over given rows, and a whole chain of drafts without Python between its tokens.
//
// Owns the order of the operations: fuse, the block (no norm before it, none after it), head and draw. Invariant, as in
// stack.h: bitwise equal to drafter/eagle's separate operations over the same kernels.
#include <vector>

#include "stack.h"

namespace paceline {
namespace {

// The activations of a pass, and the input of the fusion.
template <typename T>
struct EagleActivations : Activations<T> {
  EagleActivations(const StackShape& s, int64_t rows, void* workspace) : Activations<T>(s, rows, workspace) {
    fused = this->template take<T>(rows * 2 * s.hidden);
    logits = this->template take<T>(rows * s.vocab);
  }

  T *fused, *logits;
};

template <typename T>
void add_rows(const T* x, const T* y, T* out, int64_t count) {
  for (int64_t at = 0; at < count; at += kLanes) {
    int n = count - at < kLanes ? static_cast<int>(count - at) : kLanes;
    store(out + at, load(x + at, n) + load(y + at, n), n);
  }
}

template <typename T>
void pass(const StackShape& s, const EagleWeights<T>& weights, const StackStep<T>& step, const T* features,
          EagleActivations<T>& a, T* out, int threads) {
  const int64_t rows = step.rows, hidden = s.hidden;
  check_rows(s, step);
  for (int64_t row = 0; row < rows; ++row) {
    T* fused = a.fused + row * 2 * hidden;
    std::memcpy(fused, weights.embedding + step.tokens[row] * hidden, hidden * sizeof(T));
    std::memcpy(fused + hidden, features + row * hidden, hidden * sizeof(T));
  }
  take_angles(s, weights.cos, weights.sin, step, a);
  linear<T>(a.fused, 2 * hidden, weights.fuse, true, nullptr, a.stream, rows, hidden, 2 * hidden, threads);
  attention_half<T>(s, *weights.layer, step, a.stream, step.k_cache, step.v_cache, a, threads);
  add_and_norm(s, rows, weights.layer->mlp_norm, a.normed, a, threads);
  mlp_half(s, *weights.layer, rows, a, threads);
  add_rows(a.stream, a.projected, out, rows * hidden);
}

}  // namespace

template <typename T>
int64_t eagle_workspace_bytes(const StackShape& s, int64_t rows) {
  return EagleActivations<T>(s, rows, nullptr).bytes;
}

template <typename T>
void eagle_pass(const StackShape& s, const EagleWeights<T>& weights, const StackStep<T>& step, const T* features,
                void* workspace, T* out, int threads) {
  EagleActivations<T> a(s, step.rows, workspace);
  pass(s, weights, step, features, a, out, threads);
}

template <typename T>
void eagle_chain(const StackShape& s, const EagleWeights<T>& weights, const EagleChain<T>& chain, void* workspace,
                 int64_t* tokens, float* scores, int threads) {
  const int64_t rows = chain.rows, block = chain.block_tokens;
  EagleActivations<T> a(s, rows, workspace);
  const std::vector<float> keep_all(rows, -INFINITY);
  std::vector<float> score(rows);
  std::vector<int64_t> drawn(rows), noise(rows), positions(rows), slots(rows);
  std::vector<int32_t> offsets(rows + 1), lengths(rows);
  for (int64_t row = 0; row <= rows; ++row) offsets[row] = static_cast<int32_t>(row);
  for (int64_t level = 0; level < chain.depth; ++level) {
    for (int64_t row = 0; row < rows; ++row) noise[row] = chain.noise_positions[row] + level;
    linear<T>(chain.hidden, s.hidden, weights.head, weights.head_packed, nullptr, a.logits, rows, s.vocab, s.hidden,
              threads);
    sample_topk<T>(a.logits, s.vocab, keep_all.data(), chain.temperature, chain.keys, noise.data(), rows, s.vocab, 1,
                   chain.scale, chain.noise, threads, drawn.data(), score.data());
    for (int64_t row = 0; row < rows; ++row) {
      tokens[row * chain.depth + level] = drawn[row];
      scores[row * chain.depth + level] = score[row];
    }
    if (level + 1 == chain.depth) return;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t local = chain.committed[row] + level;
      if (local / block >= chain.table_width)
        throw std::out_of_range("request " + std::to_string(row) + ": no block for its drafted token");
      slots[row] = chain.block_tables[row * chain.table_width + local / block] * block + local % block;
      positions[row] = std::min(chain.positions[row] + level, s.positions - 1);
      lengths[row] = static_cast<int32_t>(local + 1);
    }
    const PageTable pages{chain.block_tables, lengths.data(), rows, chain.table_width, block, chain.cache_slots};
    const StackStep<T> step{rows,          drawn.data(),  positions.data(), slots.data(), chain.k_cache,
                            chain.v_cache, pages, offsets.data(),   nullptr,      0};
    pass(s, weights, step, chain.hidden, a, chain.hidden, threads);
  }
}

#define INSTANTIATE(T)                                                                                              \
  template int64_t eagle_workspace_bytes<T>(const StackShape&, int64_t);                                            \
  template void eagle_pass(const StackShape&, const EagleWeights<T>&, const StackStep<T>&, const T*, void*, T*,     \
                           int);                                                                                    \
  template void eagle_chain(const StackShape&, const EagleWeights<T>&, const EagleChain<T>&, void*, int64_t*,  \
                            float*, int);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace paceline
