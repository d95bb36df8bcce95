// What the kernels offer to the binding. Raw pointers and sizes; shapes are checked by the Python wrapper.
//
// Strides are in elements, from one row to the next; inside a row everything is contiguous. `threads` never changes a
// result: work is split between tasks that share no sums.
#pragma once

#include <cstdint>

#include "vec.h"

namespace paceline {

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t width, float eps, int threads);

// total = x + residual (rounded to T), out = rms_norm(total).
template <typename T>
void add_rms_norm(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t rows, int64_t width,
                  float eps);

template <typename T>
void rms_norm_backward(const T* grad, const T* x, const T* weight, T* grad_x, float* grad_weight, int64_t rows,
                       int64_t width, float eps, int threads);

template <typename T>
void swiglu(const T* gate_up, T* out, int64_t rows, int64_t width, int threads);

template <typename T>
void swiglu_backward(const T* grad, const T* gate_up, T* grad_gate_up, int64_t rows, int64_t width, int threads);

// Rotates [rows, heads, head_dim] by the angles of cos, sin [rows, head_dim / 2]; backwards if `inverse`.
template <typename T>
void rope(const T* x, int64_t x_stride, const float* cos, const float* sin, T* out, int64_t rows, int64_t heads,
          int64_t head_dim, bool inverse, int threads);

// Per-head norm (where a weight is given), then rope, of the query and key heads of a fused projection's rows.
template <typename T>
void split_qkv(const T* qkv, int64_t stride, const float* cos, const float* sin, const T* q_norm, const T* k_norm,
               float eps, T* q, T* k, int64_t rows, int64_t query_heads, int64_t kv_heads, int64_t head_dim);

template <typename T>
void write_kv(const T* k, int64_t k_stride, const T* v, int64_t v_stride, T* k_cache, T* v_cache,
              const int64_t* slots, int64_t rows, int64_t width, int64_t cache_slots);

struct AttentionShape {
  int64_t rows;  // query rows; the offsets must cut exactly these
  int64_t query_heads, kv_heads, head_dim;
  int64_t q_stride, k_stride, v_stride;  // elements between tokens
  float scale;
  int threads;
};

// Rows of packed segments: segment i has the rows [offsets[i], offsets[i + 1]). With `parents` (or null) it continues the
// segment parents[i] < i, or begins a sequence (-1): its rows see those of all that it continues. Depth-first order.
struct PackedSegments {
  const int32_t *offsets, *parents;
  int64_t count;
};

template <typename T>
void packed_attention(const T* q, const T* k, const T* v, const PackedSegments& segments, T* out,
                      const AttentionShape& shape);

template <typename T>
void packed_attention_backward(const T* grad, const T* q, const T* k, const T* v, const PackedSegments& segments,
                               T* grad_q, T* grad_k, T* grad_v, const AttentionShape& shape);

// Where the tokens of each request lie in the KV cache.
struct PageTable {
  const int32_t* block_tables;  // [requests, table_width]
  const int32_t* context_lens;  // [requests], tokens, the query rows included
  int64_t requests, table_width, block_tokens, cache_slots;

  // Cache slots of the positions [first, last) of a request.
  void slots(int64_t request, int64_t first, int64_t last, int32_t* out) const;
  // Throws where a read would leave the cache, a table or the mask.
  void check(const int32_t* query_offsets, int64_t max_queries) const;
};

// tree_mask: null, or [query rows, tree_width] with 1 where a query row may see its request's query row of that column.
template <typename T>
void paged_attention(const T* q, const T* k_cache, const T* v_cache, const PageTable& pages,
                     const int32_t* query_offsets, const uint8_t* tree_mask, int64_t tree_width, T* out,
                     const AttentionShape& shape);

template <typename T>
void sample(const T* logits, int64_t stride, const float* cutoff, const float* temperature, const int64_t* keys,
            const int64_t* positions, int64_t rows, int64_t vocab, int threads, int64_t* tokens, float* logprobs,
            float* logprobs_t1);

// The k <= vocab largest of logits / T + G (noise; without it logits / T; at temperature 0 the logits) in falling order,
// the smaller token first among equals, and log-softmax of those values divided by `scale`. tokens, logprobs [rows, k].
template <typename T>
void sample_topk(const T* logits, int64_t stride, const float* cutoff, const float* temperature, const int64_t* keys,
                 const int64_t* positions, int64_t rows, int64_t vocab, int64_t k, float scale, bool noise, int threads,
                 int64_t* tokens, float* logprobs);

// log-softmax of rows [rows, vocab]: at the drawn token the number that `sample` gives for temperature 1.
void log_softmax(const float* x, float* out, int64_t rows, int64_t vocab, int threads);

// Of each row of logits, [rows] each: the largest, the logarithm of the sum of exp((logit - top) / temperature), the same
// at temperature 1, that sum, and the entropy of softmax(logits / temperature).
struct SoftmaxFacts {
  float *top, *log_total, *log_total_t1, *total, *entropy;
};

// Logits [rows, vocab] become the terms of their softmax, exp((logit - top) / temperature), not yet divided by their sum,
// which the target's term is reduced by: -total times the gradient of log softmax at the target. Sums are those of
// `sample` and `log_softmax`. temperature > 0.
void softmax_terms(float* x, const int64_t* targets, float temperature, int64_t rows, int64_t vocab, int threads,
                   const SoftmaxFacts& facts);

void random_words(const int64_t* keys, const int64_t* positions, int64_t rows, int64_t vocab, int64_t* out);

// Elements of the panel format of a [columns, depth] weight (columns rounded up to whole panels).
int64_t packed_size(int64_t columns, int64_t depth);

template <typename T>
void pack_weight(const T* weight, int64_t columns, int64_t depth, T* out);

// out [rows, columns] = x [rows, depth] weight^T + bias (or null). weight: panels if `packed`, else [columns, depth].
template <typename T>
void linear(const T* x, int64_t stride, const T* weight, bool packed, const T* bias, T* out, int64_t rows,
            int64_t columns, int64_t depth, int threads);

// A weight [columns, depth] in few bits, in panels (native/low_bit.h): 8 bits in one group, or 4 in groups of a multiple
// of 64 inputs.
struct LowBitWeight {
  const uint8_t* panels;
  int64_t bits, columns, depth, groups;

  // Of the panels.
  int64_t packed_bytes() const;
};

// values: int8 [columns, depth], or two to a byte, the even input in the low half; scales [columns, groups]; zeros as
// scales, not read for 8 bits.
void pack_low_bit(const LowBitWeight& shape, const uint8_t* values, const float* scales, const uint8_t* zeros,
                  uint8_t* out, int threads);

// The panels of `weight` [columns, depth] rounded as models/low_bit.py's `quantise` does, to `bits` of those that `shape`
// stores.
template <typename T>
void quantise_pack(const T* weight, const LowBitWeight& shape, int64_t bits, uint8_t* out, int threads);

// Rows in eight bits each, as models/ops/low_bit.py's quantise_tokens: values [rows, value_stride], the columns past the
// depth zero; scales [rows]; sums [rows, groups] of equal groups (or null).
template <typename T>
void quantise_rows(const T* x, int64_t stride, int64_t rows, int64_t depth, int64_t groups, int8_t* values,
                   int64_t value_stride, float* scales, int32_t* sums, int threads);

// out [rows, columns] = x [rows, depth] weight^T + bias (or null). What x was rounded to goes to `values` [rows, depth]
// and `scales` [rows], unless null.
template <typename T>
void low_bit_linear(const T* x, int64_t stride, const LowBitWeight& weight, const T* bias, T* out, int64_t rows,
                    int threads, int8_t* values = nullptr, float* scales = nullptr);

// A decoder-only transformer between token ids and hidden states, as models/transformer.py computes it.
struct StackShape {
  int64_t layers, hidden, query_heads, kv_heads, head_dim, intermediate;
  int64_t vocab, positions;  // rows of the embedding and of the angle tables
  float eps, scale;           // of every norm; of attention scores
  int64_t bits;               // of the blocks' products; 0: they are of the other dtype
  int64_t hidden_groups, query_groups, inner_groups;  // scales of an output whose inputs are the hidden state, ...

  // Bytes that `decoder_stack` needs for this many rows.
  template <typename T>
  int64_t workspace_bytes(int64_t rows) const;
};

// One block's weights. Products are in panels, of T or of StackShape's bits; biases and head norms are null where the
// model has none. Nothing but pointers: models/ops/stack.py writes an array of these.
template <typename T>
struct StackLayer {
  const T* input_norm;
  const void* qkv;
  const T *qkv_bias, *q_norm, *k_norm;
  const void* o;
  const T *o_bias, *mlp_norm;
  const void* gate_up;
  const T* gate_up_bias;
  const void* down;
  const T* down_bias;
};

template <typename T>
struct StackWeights {
  const StackLayer<T>* layers;
  const T *embedding, *final_norm;
  const float *cos, *sin;  // [positions, head_dim / 2]
};

// The rows of one step, as for `paged_attention`; caches are [layers, cache_slots, kv_heads, head_dim].
template <typename T>
struct StackStep {
  int64_t rows;
  const int64_t *tokens, *positions, *kv_slots;
  T *k_cache, *v_cache;
  PageTable pages;
  const int32_t* query_offsets;
  const uint8_t* tree_mask;
  int64_t tree_width;
};

// Embedding, every block and the final norm. out [rows, hidden]. Throws before the cache is written where a token,
// position or slot lies outside its table.
template <typename T>
void decoder_stack(const StackShape& shape, const StackWeights<T>& weights, const StackStep<T>& step, void* workspace,
                   T* out, int threads);

// An EAGLE drafter over the embedding and head of its target. The block has no input norm; fuse is in panels
// [hidden, 2 hidden], the head [vocab, hidden] is if `head_packed`.
template <typename T>
struct EagleWeights {
  const StackLayer<T>* layer;
  const T *fuse, *embedding, *head;
  bool head_packed;
  const float *cos, *sin;  // [positions, head_dim / 2]
};

// Of eagle_pass and eagle_chain over so many rows. `shape.layers` is not read.
template <typename T>
int64_t eagle_workspace_bytes(const StackShape& shape, int64_t rows);

// One pass: embeddings of step.tokens and features [rows, hidden] -> features of the next position, out [rows, hidden].
// Caches are [cache_slots, kv_heads, head_dim]; throws as decoder_stack.
template <typename T>
void eagle_pass(const StackShape& shape, const EagleWeights<T>& weights, const StackStep<T>& step, const T* features,
                void* workspace, T* out, int threads);

// Where the drafts of `rows` requests begin. Positions beyond the last are taken to be the last.
template <typename T>
struct EagleChain {
  int64_t rows, depth;
  T* hidden;                        // [rows, hidden]: features of the last known position; overwritten
  const int64_t* positions;         // [rows], of the first drafted token's row
  const int64_t* committed;         // [rows], its index in the request's tables
  const int32_t* block_tables;      // [rows, table_width]
  int64_t table_width, block_tokens;
  T *k_cache, *v_cache;
  int64_t cache_slots;
  const float* temperature;         // [rows]
  const int64_t *keys, *noise_positions;  // [rows], of the first drawn token
  float scale;                      // of the scores; as in sample_topk
  bool noise;                       // add the target's noise
};

// Draws tokens [rows, depth], each from the head over the features and fed back, and their scores as sample_topk's.
template <typename T>
void eagle_chain(const StackShape& shape, const EagleWeights<T>& weights, const EagleChain<T>& chain, void* workspace,
                 int64_t* tokens, float* scores, int threads);

// Test hooks: the vectorised functions over n values.
void exp_array(const float* x, float* out, int64_t n);
void log_array(const float* x, float* out, int64_t n);
void log1m_array(const float* x, float* out, int64_t n);

}  // namespace paceline
