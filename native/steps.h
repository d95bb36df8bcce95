// The array work of an engine step: cleaning drafts, laying out the rows of a forward, and applying its draws.
//
// actors/engine/batch/step/reference.py is the same in NumPy and documents each function; both give equal arrays.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline {

// The memory of actors.engine.batch.slots.SlotTable. Arrays without a shape are [slots].
struct SlotArrays {
  int32_t* tokens;                            // [slots, width]
  float *logprobs, *logprobs_t1;              // [slots, width]
  const int32_t* block_tables;                // [slots, table_width]
  int64_t *length, *computed, *spared_steps, *drafted, *accepted;
  const int64_t *limit, *noise_origin, *reported, *block_counts, *noise_key, *top_k;
  const float *temperature, *top_p;
  int64_t slots, width, table_width, block_tokens;

  int64_t kv_slot(int64_t slot, int64_t position) const {
    return int64_t{block_tables[slot * table_width + position / block_tokens]} * block_tokens + position % block_tokens;
  }
};

// Output arrays for the rows of a step, with the capacity set by ModelRunner.resize.
struct RowArrays {
  int64_t *tokens, *positions, *kv_slots, *sample_rows, *noise_keys, *noise_positions, *top_k;
  float *temperature, *top_p;
  int32_t *query_offsets, *context_lens, *block_tables;
  uint8_t* tree_mask;
  int64_t rows, mask_bytes;
};

struct Plan {
  const int64_t *slots, *rows;
  const bool* samples;
  int64_t requests;
};

// Drafts as a drafter returned them: rows may be apart, parents null for chains.
struct RawDrafts {
  const int64_t *tokens, *counts, *parents;
  int64_t width, token_stride, parent_stride;
};

// Clean drafts; counts by request of the plan, the rest [S, width] by sampling request.
struct StepDrafts {
  const int64_t *counts, *tokens, *parents, *depths;
  int64_t width;
};

struct Cleaned {
  int64_t drafted;
  bool short_of_blocks;  // some request needs a block that it does not have
};

struct Rows {
  int64_t total, most, max_context, sampled;
  bool truncated;
};

struct Draws {
  const int64_t* tokens;
  const float *logprobs, *logprobs_t1;
  int64_t count;
};

struct Settled {
  int64_t emitted, accepted, moves;
  bool flagged;
};

enum Flag : uint8_t { kStopped = 1, kEnded = 2, kDue = 4 };

Cleaned clean_drafts(const SlotArrays& table, const int64_t* slots, int64_t requests, const RawDrafts& drafts,
                     int64_t depth, int64_t vocab, int64_t* tokens, int64_t* counts, int64_t* parents, int64_t* depths);
Rows plan_rows(const SlotArrays& table, const Plan& plan, const StepDrafts* drafts, const RowArrays& out);
// emitted, accepted, flags [S]; path [S, width + 1], sources and targets [S * width] only for trees.
Settled settle(const SlotArrays& table, const Plan& plan, const Draws& draws, const StepDrafts* drafts,
               const int64_t* stop, int64_t stops, int64_t progress_every, int64_t* emitted, int64_t* accepted,
               uint8_t* flags, int64_t* path, int64_t* sources, int64_t* targets);
// [layers, slots, row_bytes]: copies row sources[i] to targets[i], in order, in every layer.
void move_rows(char* cache, int64_t layers, int64_t slots, int64_t row_bytes, const int64_t* sources,
               const int64_t* targets, int64_t count);

}  // namespace paceline
