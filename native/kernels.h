// The kernels that the binding calls. Raw pointers and sizes; the Python wrapper checks shapes.
//
// Strides are in elements, from one row to the next; inside a row everything is contiguous. `threads` never changes a
// result: work is divided between tasks without common sums.
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

// Per-head norm (if a weight is given), then rope, of the query and key heads of a fused projection's rows.
template <typename T>
void split_qkv(const T* qkv, int64_t stride, const float* cos, const float* sin, const T* q_norm, const T* k_norm,
               float eps, T* q, T* k, int64_t rows, int64_t query_heads, int64_t kv_heads, int64_t head_dim);

template <typename T>
void write_kv(const T* k, int64_t k_stride, const T* v, int64_t v_stride, T* k_cache, T* v_cache,
              const int64_t* slots, int64_t rows, int64_t width, int64_t cache_slots);

struct AttentionShape {
  int64_t rows;  // query rows; the offsets must divide exactly these
  int64_t query_heads, kv_heads, head_dim;
  int64_t q_stride, k_stride, v_stride;  // elements between tokens
  float scale;
  int threads;
};

// Rows of packed segments: segment i has the rows [offsets[i], offsets[i + 1]). With `parents` (or null) it continues
// the segment parents[i] < i, or begins a sequence (-1): its rows see those of all its ancestors. Depth-first order.
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

// The places of each request's tokens in the KV cache.
struct PageTable {
  const int32_t* block_tables;  // [requests, table_width]
  const int32_t* context_lens;  // [requests], tokens, including the query rows
  int64_t requests, table_width, block_tokens, cache_slots;

  // Cache slots of the positions [first, last) of a request.
  void slots(int64_t request, int64_t first, int64_t last, int32_t* out) const;
  // Throws if a read would be outside the cache, a table or the mask.
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

// The k <= vocab largest of logits / T + G in falling order, the smaller token first among equals. Without `noise`:
// logits / T; at temperature 0: the logits. Then log-softmax of those values divided by `scale`. tokens, logprobs
// [rows, k].
template <typename T>
void sample_topk(const T* logits, int64_t stride, const float* cutoff, const float* temperature, const int64_t* keys,
                 const int64_t* positions, int64_t rows, int64_t vocab, int64_t k, float scale, bool noise, int threads,
                 int64_t* tokens, float* logprobs);

// log-softmax of rows [rows, vocab]; at the drawn token equal to the result of `sample` for temperature 1.
void log_softmax(const float* x, float* out, int64_t rows, int64_t vocab, int threads);

// Facts of each row of logits, [rows] each: the largest logit, the logarithm of the sum of exp((logit - top) /
// temperature), the same at temperature 1, that sum, and the entropy of softmax(logits / temperature).
struct SoftmaxFacts {
  float *top, *log_total, *log_total_t1, *total, *entropy;
};

// Turns logits [rows, vocab] into the terms of their softmax, exp((logit - top) / temperature), not yet divided by
// their sum. Subtracts the sum from the target's term: the result is -total times the gradient of log softmax at the
// target. Sums are those of `sample` and `log_softmax`. temperature > 0.
void softmax_terms(float* x, const int64_t* targets, float temperature, int64_t rows, int64_t vocab, int threads,
                   const SoftmaxFacts& facts);

void random_words(const int64_t* keys, const int64_t* positions, int64_t rows, int64_t vocab, int64_t* out);

// Elements of the panel format of a [columns, depth] weight (columns rounded up to whole panels).
int64_t packed_size(int64_t columns, int64_t depth);

template <typename T>
void pack_weight(const T* weight, int64_t columns, int64_t depth, T* out);

// The update scale * b a of rows [start, stop) of a weight: a [rank, depth], b [stop - start, rank]. The order of the
// fields is that of a row of models/ops/adapted.py's table.
struct LowRank {
  const float *a, *b;
  int64_t start, stop, rank;
  double scale;  // rounded to float32
};

// A weight [columns, depth] and updates of rows that do not overlap.
template <typename T>
struct Adapted {
  const T* weight;
  const LowRank* updates;
  int64_t count;
};

// out [rows, depth] = weight with its updates: each summed in float32, r rising, scaled, added, rounded once.
template <typename T>
void merge_rows(const Adapted<T>& weight, T* out, int64_t rows, int64_t depth, int threads);

// `linear` with the merged weight, which is merged and packed where it is used and never stored.
template <typename T>
void adapted_linear(const T* x, int64_t stride, const Adapted<T>& weight, const T* bias, T* out, int64_t rows,
                    int64_t columns, int64_t depth, int threads);

// out [rows, columns] = x [rows, depth] weight^T + bias (or null). weight: panels if `packed`, else [columns, depth].
template <typename T>
void linear(const T* x, int64_t stride, const T* weight, bool packed, const T* bias, T* out, int64_t rows,
            int64_t columns, int64_t depth, int threads);

// A low-bit weight [columns, depth], in panels (native/low_bit.h): 8 bits in one group, or 4 in groups of a multiple of
// 64 inputs.
struct LowBitWeight {
  const uint8_t* panels;
  int64_t bits, columns, depth, groups;

  // Bytes of the panels.
  int64_t packed_bytes() const;
};

// values: int8 [columns, depth], or two to a byte, the even input in the low half; scales [columns, groups]; zeros like
// scales, not read for 8 bits.
void pack_low_bit(const LowBitWeight& shape, const uint8_t* values, const float* scales, const uint8_t* zeros,
                  uint8_t* out, int threads);

// Rounds `weight` [columns, depth] to `bits` as models/low_bit.py's `quantise` does, and packs it into panels with the
// bits of `shape`.
template <typename T>
void quantise_pack(const T* weight, const LowBitWeight& shape, int64_t bits, uint8_t* out, int threads);

// Rounds rows to eight bits, like models/ops/low_bit.py's quantise_tokens: values [rows, value_stride], zero past the
// depth; scales [rows]; sums [rows, groups] of equal groups (or null).
template <typename T>
void quantise_rows(const T* x, int64_t stride, int64_t rows, int64_t depth, int64_t groups, int8_t* values,
                   int64_t value_stride, float* scales, int32_t* sums, int threads);

// out [rows, columns] = x [rows, depth] weight^T + bias (or null). Writes the rounded x to `values` [rows, depth] and
// `scales` [rows], unless null.
template <typename T>
void low_bit_linear(const T* x, int64_t stride, const LowBitWeight& weight, const T* bias, T* out, int64_t rows,
                    int threads, int8_t* values = nullptr, float* scales = nullptr);

// A decoder-only transformer from token ids to hidden states, as models/transformer.py computes it.
struct StackShape {
  int64_t layers, hidden, query_heads, kv_heads, head_dim, intermediate;
  int64_t vocab, positions;  // rows of the embedding and of the angle tables
  float eps, scale;           // of every norm; of attention scores
  int64_t bits;               // of the blocks' products; 0: they are of the other dtype
  int64_t hidden_groups, query_groups, inner_groups;  // scales per output, by input: the hidden state, ...

  // Bytes that `decoder_stack` needs for this many rows.
  template <typename T>
  int64_t workspace_bytes(int64_t rows) const;
};

// One block's weights. Products are in panels, of T or of StackShape's bits; biases and head norms are null if the
// model has none. Only pointers: models/ops/stack.py writes an array of these.
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

// Embedding, every block and the final norm. out [rows, hidden]. Throws before writing the cache if a token, position
// or slot is outside its table.
template <typename T>
void decoder_stack(const StackShape& shape, const StackWeights<T>& weights, const StackStep<T>& step, void* workspace,
                   T* out, int threads);

// An EAGLE drafter over the embedding and head of its target. The block has no input norm; fuse is in panels [hidden, 2
// hidden], and so is the head [vocab, hidden] if `head_packed`.
template <typename T>
struct EagleWeights {
  const StackLayer<T>* layer;
  const T *fuse, *embedding, *head;
  bool head_packed;
  const float *cos, *sin;  // [positions, head_dim / 2]
};

// Workspace of eagle_pass and eagle_chain over `rows` rows. `shape.layers` is not read.
template <typename T>
int64_t eagle_workspace_bytes(const StackShape& shape, int64_t rows);

// One pass: embeddings of step.tokens and features [rows, hidden] -> features of the next position, out [rows, hidden].
// Caches are [cache_slots, kv_heads, head_dim]; throws as decoder_stack.
template <typename T>
void eagle_pass(const StackShape& shape, const EagleWeights<T>& weights, const StackStep<T>& step, const T* features,
                void* workspace, T* out, int threads);

// The start of the drafts of `rows` requests. Positions beyond the last count as the last.
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
