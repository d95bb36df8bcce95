// A chain's passes: stack, head, cutoff and draw, once per depth.
//
// Owns which requests have rows in a pass. Requests with the most tokens to draft come first, so that each pass has a
// prefix of the previous pass's rows. Every number is that of the separate operations.
#include "draft_chain.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "stack.h"

namespace paceline {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename T>
struct ChainActivations : Activations<T> {
  ChainActivations(const StackShape& s, int64_t rows, void* workspace) : Activations<T>(s, rows, workspace) {
    hidden = this->template take<T>(rows * s.hidden);
    logits = this->template take<T>(rows * s.vocab);
  }

  T *hidden, *logits;
};

// The smallest logit that may be drawn: models/ops/reference.py's `cutoff`, except for the rounding of sums.
template <typename T>
float least_logit(const T* logits, int64_t vocab, float temperature, int64_t top_k, float top_p) {
  static thread_local std::vector<float> values;
  values.resize(vocab);
  for (int64_t at = 0; at < vocab; at += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, vocab - at));
    const f32x8 logit = load(logits + at, count);
    store(values.data() + at, select(logit == logit, logit, splat(-kInfinity)), count);  // a NaN has no order
  }
  const float divisor = temperature == 0.0f ? 1.0f : temperature;
  auto end = values.end();
  if (top_k > 0 && top_k < vocab) {
    std::nth_element(values.begin(), values.begin() + (top_k - 1), values.end(), std::greater<float>());
    end = values.begin() + top_k;
  }
  if (!(top_p < 1.0f)) return end == values.end() ? -kInfinity : *(end - 1);
  std::make_heap(values.begin(), end);
  const float top = values.front();
  double total = 0, before = 0;
  for (auto value = values.begin(); value != end; ++value) total += std::exp((*value - top) / divisor);
  float least = top;
  while (end != values.begin() && before < top_p * total) {
    std::pop_heap(values.begin(), end);
    least = *--end;
    before += std::exp((least - top) / divisor);
  }
  return least;
}

// The logits that may be drawn; -inf for the others.
template <typename T>
void keep(const T* logits, int64_t vocab, float least, T* out) {
  for (int64_t at = 0; at < vocab; at += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, vocab - at));
    const f32x8 logit = load(logits + at, count);
    store(out + at, select(logit < splat(least), splat(-kInfinity), logit), count);
  }
}

}  // namespace

template <typename T>
int64_t draft_chain_workspace_bytes(const StackShape& shape, int64_t requests) {
  return ChainActivations<T>(shape, requests, nullptr).bytes;
}

template <typename T>
void draft_chain(const StackShape& s, const StackWeights<T>& weights, const ChainHead& head,
                 const DraftChain<T>& chain, void* workspace, int64_t* tokens, int threads) {
  const int64_t requests = chain.requests, depth = chain.depth, block = chain.block_tokens;
  std::fill_n(tokens, requests * depth, int64_t{-1});
  check_range(chain.slots, requests, chain.table_slots, "slot");
  check_range(chain.counts, requests, depth + 1, "count");
  std::vector<int64_t> order(requests);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return chain.counts[a] > chain.counts[b]; });
  int64_t rows = 0, longest = 1;
  while (rows < requests && chain.counts[order[rows]] > 0) ++rows;
  order.resize(rows);
  for (int64_t r : order) {
    longest = std::max(longest, chain.lengths[r] - 1 + chain.counts[r]);
    if (chain.lengths[r] < 1 || chain.lengths[r] > chain.history_width)
      throw std::out_of_range("request " + std::to_string(r) + ": length " + std::to_string(chain.lengths[r]) +
                              " is outside the history");
  }
  const int64_t width = (longest + block - 1) / block;
  if (width > chain.table_width)
    throw std::out_of_range("a request drafts to position " + std::to_string(longest) + ", behind its block table");

  std::vector<int64_t> last(rows), positions(rows), kv_slots(rows), keys(rows), noise(rows);
  std::vector<int32_t> tables(rows * width), offsets(rows + 1), context(rows);
  std::vector<float> temperature(rows), least(rows), scores(2 * rows);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t r = order[i];
    std::copy_n(chain.block_tables + chain.slots[r] * chain.table_width, width, tables.data() + i * width);
    last[i] = chain.history[chain.slots[r] * chain.history_width + chain.lengths[r] - 1];
    temperature[i] = chain.temperature[r], keys[i] = chain.keys[r];
    offsets[i + 1] = static_cast<int32_t>(i + 1);
  }
  ChainActivations<T> a(s, rows, workspace);
  for (int64_t level = 0; level < depth; ++level) {
    while (rows > 0 && chain.counts[order[rows - 1]] <= level) --rows;
    if (rows == 0) return;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t r = order[i], position = chain.lengths[r] - 1 + level;
      positions[i] = position;
      kv_slots[i] = int64_t{tables[i * width + position / block]} * block + position % block;
      context[i] = static_cast<int32_t>(position + 1);
      noise[i] = chain.lengths[r] - chain.prompt_lengths[r] + level;
    }
    const PageTable pages{tables.data(), context.data(), rows, width, block, chain.cache_slots};
    const StackStep<T> step{rows,          last.data(), positions.data(), kv_slots.data(), chain.k_cache,
                            chain.v_cache, pages,       offsets.data(),   nullptr,         0};
    decoder_stack(s, weights, step, workspace, a.hidden, threads);
    if (head.bits == 0)
      linear<T>(a.hidden, s.hidden, static_cast<const T*>(head.weight), head.packed, nullptr, a.logits, rows, s.vocab,
                s.hidden, threads);
    else
      low_bit_linear<T>(a.hidden, s.hidden, {static_cast<const uint8_t*>(head.weight), head.bits, s.vocab, s.hidden, 1},
                        nullptr, a.logits, rows, threads);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t r = order[i];
      const T* logits = a.logits + i * s.vocab;
      const bool truncated = chain.top_k[r] > 0 || chain.top_p[r] < 1.0f;
      least[i] = truncated ? least_logit(logits, s.vocab, temperature[i], chain.top_k[r], chain.top_p[r]) : -kInfinity;
      if (chain.logits != nullptr) keep(logits, s.vocab, least[i], chain.logits + (r * depth + level) * s.vocab);
    }
    sample<T>(a.logits, s.vocab, least.data(), temperature.data(), keys.data(), noise.data(), rows, s.vocab, threads,
              last.data(), scores.data(), scores.data() + rows);
    for (int64_t i = 0; i < rows; ++i) tokens[order[i] * depth + level] = last[i];
  }
}

#define INSTANTIATE(T)                                                                                              \
  template int64_t draft_chain_workspace_bytes<T>(const StackShape&, int64_t);                                      \
  template void draft_chain(const StackShape&, const StackWeights<T>&, const ChainHead&, const DraftChain<T>&, void*, \
                            int64_t*, int);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace paceline
