// Chains of drafts by a copy of the target, over the target's own paged cache, in one call.
#pragma once

#include "kernels.h"

namespace paceline {

// The head that computes the logits [rows, vocab]. `bits` 8: panels of LowBitWeight; 0: of T, panels if `packed`.
struct ChainHead {
  const void* weight;
  int64_t bits;
  bool packed;
};

// The requests of the chains. Tables are the engine's, by slot; arrays without a shape are [requests].
template <typename T>
struct DraftChain {
  int64_t requests, depth;
  const int64_t *slots, *lengths, *prompt_lengths, *counts;  // counts: tokens to draft, at most depth
  const int32_t* history;                                    // [table_slots, history_width]
  int64_t history_width;
  const int32_t* block_tables;  // [table_slots, table_width]
  int64_t table_slots, table_width, block_tokens, cache_slots;
  T *k_cache, *v_cache;  // [layers, cache_slots, kv_heads, head_dim]
  const float *temperature, *top_p;
  const int64_t *top_k, *keys;
  T* logits;  // [requests, depth, vocab], or null: the logits drawn from, -inf where excluded
};

template <typename T>
int64_t draft_chain_workspace_bytes(const StackShape& shape, int64_t requests);

// Draws tokens [requests, depth] one after another from the last known token on, -1 past the counts. Writes the keys
// and values of the positions lengths - 1 .. lengths + counts - 2. Throws std::out_of_range for anything outside its
// table, before that pass writes the cache.
template <typename T>
void draft_chain(const StackShape& shape, const StackWeights<T>& weights, const ChainHead& head,
                 const DraftChain<T>& chain, void* workspace, int64_t* tokens, int threads);

}  // namespace paceline
