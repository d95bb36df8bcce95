#include "steps.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace paceline {
namespace {

// Whether node i of a tree may follow the nodes before it; sets depths[i] if so.
bool fits(const int64_t* tokens, const int64_t* parents, int64_t* depths, int64_t i, int64_t deepest) {
  int64_t parent = parents[i];
  if (parent < -1 || parent >= i) return false;
  depths[i] = parent < 0 ? 1 : depths[parent] + 1;
  if (depths[i] > deepest) return false;
  for (int64_t j = parent + 1; j < i; ++j)
    if (parents[j] == parent && tokens[j] == tokens[i]) return false;
  return true;
}

// The rows of one request for RowArrays.
struct RequestRows {
  int64_t slot, first, known, nodes;
  const int64_t *parents, *depths;  // null: a chain, or no drafts

  int64_t count() const { return known + nodes; }
  int64_t position(int64_t row) const {
    return depths != nullptr && row >= known ? first + known - 1 + depths[row - known] : first + row;
  }
};

void write_mask(const RequestRows& request, uint8_t* mask, int64_t width) {
  std::memset(mask, 0, request.count() * width);
  mask[0] = 1;
  for (int64_t i = 0; i < request.nodes; ++i) {
    uint8_t* row = mask + (i + 1) * width;
    std::memcpy(row, mask + (request.parents[i] + 1) * width, i + 1);
    row[i + 1] = 1;
  }
}

}  // namespace

Cleaned clean_drafts(const SlotArrays& table, const int64_t* slots, int64_t requests, const RawDrafts& drafts,
                     int64_t depth, int64_t vocab, int64_t* tokens, int64_t* counts, int64_t* parents,
                     int64_t* depths) {
  Cleaned result{0, false};
  for (int64_t r = 0; r < requests; ++r) {
    int64_t slot = slots[r], length = table.length[slot], offset = r * drafts.width, n = 0;
    int64_t most = std::min({drafts.counts[r], drafts.width, table.limit[slot] - length - 1});
    const int64_t* given = drafts.tokens + r * drafts.token_stride;
    int32_t* known = table.tokens + slot * table.width + length;
    for (; n < most; ++n) {
      if (given[n] < 0 || given[n] >= vocab) break;
      tokens[offset + n] = given[n];
      if (drafts.parents != nullptr) {
        parents[offset + n] = drafts.parents[r * drafts.parent_stride + n];
        if (!fits(tokens + offset, parents + offset, depths + offset, n, depth)) break;
      }
      known[n] = static_cast<int32_t>(given[n]);
    }
    counts[r] = n;
    std::fill(tokens + offset + n, tokens + offset + drafts.width, -1);
    if (drafts.parents != nullptr) {
      std::fill(parents + offset + n, parents + offset + drafts.width, -1);
      std::fill(depths + offset + n, depths + offset + drafts.width, 0);
    }
    result.drafted += n;
    result.short_of_blocks |= length + n > table.block_counts[slot] * table.block_tokens;
  }
  return result;
}

Rows plan_rows(const SlotArrays& table, const Plan& plan, const StepDrafts* drafts, const RowArrays& out) {
  Rows result{0, 0, 0, 0, false};
  bool tree = drafts != nullptr && drafts->parents != nullptr;
  int64_t row = 0, sampled = 0, mask_width = tree ? drafts->width + 1 : 0;
  out.query_offsets[0] = 0;
  for (int64_t r = 0; r < plan.requests; ++r) {
    int64_t slot = plan.slots[r];
    RequestRows request{slot, table.computed[slot], plan.rows[r], drafts == nullptr ? 0 : drafts->counts[r], nullptr,
                        nullptr};
    if (tree) {  // every request samples
      request.parents = drafts->parents + r * drafts->width;
      request.depths = drafts->depths + r * drafts->width;
    }
    int64_t count = request.count();
    if (row + count > out.rows || (row + count) * mask_width > out.mask_bytes)
      throw std::length_error("more rows than the step's arrays hold");
    if (tree) write_mask(request, out.tree_mask + row * mask_width, mask_width);
    const int32_t* tokens = table.tokens + slot * table.width;
    int64_t draws_from = table.length[slot] - 1 - request.first;  // first row that is drawn from
    bool truncated = table.top_k[slot] > 0 || table.top_p[slot] < 1;
    for (int64_t i = 0; i < count; ++i, ++row) {
      int64_t place = request.first + i, position = request.position(i);
      out.tokens[row] = tokens[place];
      out.positions[row] = position;
      out.kv_slots[row] = table.kv_slot(slot, place);
      if (i < draws_from) continue;
      out.sample_rows[sampled] = row;
      out.noise_keys[sampled] = table.noise_key[slot];
      out.noise_positions[sampled] = position + 1 - table.noise_origin[slot];
      out.temperature[sampled] = table.temperature[slot];
      out.top_k[sampled] = table.top_k[slot];
      out.top_p[sampled] = table.top_p[slot];
      result.truncated |= truncated;
      ++sampled;
    }
    out.query_offsets[r + 1] = static_cast<int32_t>(row);
    out.context_lens[r] = static_cast<int32_t>(request.first + count);
    result.most = std::max(result.most, count);
    result.max_context = std::max(result.max_context, request.first + count);
  }
  int64_t blocks = (result.max_context + table.block_tokens - 1) / table.block_tokens;
  for (int64_t r = 0; r < plan.requests; ++r)
    std::memcpy(out.block_tables + r * blocks, table.block_tables + plan.slots[r] * table.table_width,
                blocks * sizeof(int32_t));
  result.total = row;
  result.sampled = sampled;
  return result;
}

Settled settle(const SlotArrays& table, const Plan& plan, const Draws& draws, const StepDrafts* drafts,
               const int64_t* stop, int64_t stops, int64_t progress_every, int64_t* emitted, int64_t* accepted,
               uint8_t* flags, int64_t* path, int64_t* sources, int64_t* targets) {
  Settled result{0, 0, 0, false};
  bool tree = drafts != nullptr && drafts->parents != nullptr;
  int64_t row = 0, s = 0;  // first row drawn from, and number, of the sampling request
  for (int64_t r = 0; r < plan.requests; ++r) {
    int64_t slot = plan.slots[r];
    if (!plan.samples[r]) {
      table.computed[slot] += plan.rows[r];
      continue;
    }
    int64_t nodes = drafts == nullptr ? 0 : drafts->counts[r];
    if (row + nodes >= draws.count) throw std::length_error("fewer draws than rows that are drawn from");
    const int64_t* draft = drafts == nullptr ? nullptr : drafts->tokens + s * drafts->width;
    const int64_t* parents = tree ? drafts->parents + s * drafts->width : nullptr;
    int64_t* way = tree ? path + s * (drafts->width + 1) : nullptr;
    if (tree) std::fill(way, way + drafts->width + 1, 0);
    int64_t length = table.length[slot], remaining = table.limit[slot] - length;
    int64_t column = 0, count = 0, stood = 0;
    bool stopped = false;
    while (true) {  // Every emitted token is the target's own draw; a draft only decides if the next draw is known.
      int64_t token = draws.tokens[row + column], place = slot * table.width + length + count;
      table.tokens[place] = static_cast<int32_t>(token);
      table.logprobs[place] = draws.logprobs[row + column];
      table.logprobs_t1[place] = draws.logprobs_t1[row + column];
      if (tree) {
        way[count] = column;
        if (column != count) {
          sources[result.moves] = table.kv_slot(slot, length - 1 + column);
          targets[result.moves++] = table.kv_slot(slot, length - 1 + count);
        }
      }
      ++count;
      int64_t child = tree ? column : column < nodes && draft[column] == token ? column : nodes;
      if (tree)  // Children come behind their parent: node column - 1 of the draft.
        while (child < nodes && (parents[child] != column - 1 || draft[child] != token)) ++child;
      stood += child < nodes;
      stopped = std::find(stop + slot * stops, stop + (slot + 1) * stops, token) != stop + (slot + 1) * stops;
      if (stopped || count == remaining || child >= nodes) break;
      column = child + 1;
    }
    table.length[slot] = length + count;
    table.computed[slot] = length + count - 1;
    table.spared_steps[slot] += count - 1;
    table.drafted[slot] += nodes;
    table.accepted[slot] += stood;
    bool ended = stopped || count == remaining;
    bool due = !ended && length + count - table.reported[slot] >= progress_every;
    flags[s] = (stopped ? kStopped : 0) | (ended ? kEnded : 0) | (due ? kDue : 0);
    result.flagged |= flags[s] != 0;
    emitted[s] = count;
    accepted[s] = stood;
    result.emitted += count;
    result.accepted += stood;
    row += nodes + 1;
    ++s;
  }
  return result;
}

void move_rows(char* cache, int64_t layers, int64_t slots, int64_t row_bytes, const int64_t* sources,
               const int64_t* targets, int64_t count) {
  for (int64_t layer = 0; layer < layers; ++layer, cache += slots * row_bytes)
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(cache + targets[i] * row_bytes, cache + sources[i] * row_bytes, row_bytes);
}

}  // namespace paceline
