// All blocks of one engine step in one call: no Python between the operations, no allocation for activations.
//
// Owns the passes from token ids to hidden states; native/stack.h has the block.
#include "stack.h"

namespace paceline {

template <typename T>
int64_t StackShape::workspace_bytes(int64_t rows) const {
  return Activations<T>(*this, rows, nullptr).bytes;
}

template <typename T>
void decoder_stack(const StackShape& s, const StackWeights<T>& weights, const StackStep<T>& step, void* workspace,
                   T* out, int threads) {
  const int64_t rows = step.rows, hidden = s.hidden, kv_width = s.kv_heads * s.head_dim;
  check_rows(s, step);
  Activations<T> a(s, rows, workspace);
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(a.stream + row * hidden, weights.embedding + step.tokens[row] * hidden, hidden * sizeof(T));
  take_angles(s, weights.cos, weights.sin, step, a);
  rms_norm(a.stream, weights.layers[0].input_norm, a.normed, rows, hidden, s.eps, threads);
  for (int64_t i = 0; i < s.layers; ++i) {
    const StackLayer<T>& layer = weights.layers[i];
    const int64_t cache = i * step.pages.cache_slots * kv_width;
    attention_half<T>(s, layer, step, a.normed, step.k_cache + cache, step.v_cache + cache, a, threads);
    add_and_norm(s, rows, layer.mlp_norm, a.normed, a, threads);
    mlp_half(s, layer, rows, a, threads);
    bool last = i + 1 == s.layers;
    add_and_norm(s, rows, last ? weights.final_norm : weights.layers[i + 1].input_norm, last ? out : a.normed, a,
                 threads);
  }
}

#define INSTANTIATE(T)                                             \
  template int64_t StackShape::workspace_bytes<T>(int64_t) const; \
  template void decoder_stack(const StackShape&, const StackWeights<T>&, const StackStep<T>&, void*, T*, int);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace paceline
