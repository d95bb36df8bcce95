// Gumbel-max sampling with both log-probs, in two passes over a row of logits, and log-softmax of whole rows. Both sum
// the vocabulary in one order, so that the log-prob of a token is the same number in both.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "philox.h"

namespace paceline {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Draw {
  int64_t token;
  float logprob, logprob_t1;
};

// Eight logits from `at` on; lanes past the vocabulary hold -inf.
template <typename T>
f32x8 part(const T* logits, int64_t vocab, int64_t at) {
  if (at + kLanes <= vocab) return load(logits + at);
  i32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  if (at >= vocab) return splat(-kInfinity);
  int count = static_cast<int>(vocab - at);
  return select(lane < count, load(logits + at, count), splat(-kInfinity));
}

template <typename T>
float largest_of(const T* logits, int64_t vocab) {
  f32x8 tops[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
  for (int64_t first = 0; first < vocab; first += 4 * kLanes)
    for (int w = 0; w < 4; ++w) tops[w] = max(part(logits, vocab, first + w * kLanes), tops[w]);
  return largest(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
}

// Takes 32 tokens at a time, also in log_softmax: adds four vectors in float32, their sum in float64.
constexpr int64_t kStep = 4 * kLanes;

// The factor c of a sound test: a token of term t = exp(scaled - scaled_top) and uniform v > c t has no larger value than
// `best`. As -log(1 - v) > v, its noise is below -log v, so its value is below scaled_top - log c. The margin covers the
// rounding of values and terms: few tokens more than needed get their noise.
float reach_of(float scaled_top, float best) {
  return std::exp(scaled_top - best + 0.125f + std::abs(scaled_top) * 0x1p-20f);
}

// A step is eight Philox blocks of four words. The noise's logarithms are computed for the few tokens that may win.
template <typename T>
Draw draw(const T* logits, int64_t vocab, float cutoff, float temperature, uint64_t key, uint32_t position) {
  const float top = largest_of(logits, vocab);
  const bool greedy = temperature == 0.0f;
  const float divisor = greedy ? 1.0f : temperature;
  const bool same = divisor == 1.0f && cutoff == -kInfinity;  // both distributions are the same
  const float scaled_top = top / divisor;

  f32x8 best = splat(-kInfinity), best_index = {};  // an index below 2^31 is kept as an int in float lanes
  float reach = kInfinity;
  LongSum total, total_t1;
  const i32x8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  for (int64_t first = 0; first < vocab; first += kStep) {
    f32x8 mass = {}, mass_t1 = {};
    u32x8 words[4] = {};
    if (!greedy) {
      philox(key, position, static_cast<uint32_t>(first / 4), words);
      to_token_order(words);
    }
    for (int w = 0; w < 4; ++w) {
      int64_t at = first + w * kLanes;
      if (at >= vocab) break;
      f32x8 logit = part(logits, vocab, at), term = exp_term(logit - top);
      mass_t1 += term;
      f32x8 scaled = same ? logit : select(logit < cutoff, splat(-kInfinity), logit / divisor);
      if (!same) mass += term = exp_term(scaled - scaled_top);
      f32x8 value = scaled;
      if (!greedy) {
        const f32x8 v = uniform(words[w]);
        if (all(v > term * reach)) continue;  // none of the eight can win
        value += gumbel(v);
      }
      i32x8 better = value > best;
      best = select(better, value, best);
      best_index = select(better, (f32x8)(lanes + static_cast<int32_t>(at)), best_index);
      if (!greedy) reach = reach_of(scaled_top, largest(best));
    }
    total_t1.add(mass_t1);
    if (!same) total.add(mass);
  }
  // The largest value; among equals the smallest token, as each lane kept its first.
  const i32x8 index = (i32x8)best_index;
  float value = best[0];
  int64_t token = index[0];
  for (int lane = 1; lane < kLanes; ++lane)
    if (best[lane] > value || (best[lane] == value && index[lane] < token)) value = best[lane], token = index[lane];

  const float chosen = load(logits + token, 1)[0];
  const float logprob_t1 = (chosen - top) - total_t1.log();
  if (greedy) return {token, 0.0f, logprob_t1};
  return {token, same ? logprob_t1 : (chosen / divisor - scaled_top) - total.log(), logprob_t1};
}

}  // namespace

template <typename T>
void sample(const T* logits, int64_t stride, const float* cutoff, const float* temperature, const int64_t* keys,
            const int64_t* positions, int64_t rows, int64_t vocab, int threads, int64_t* tokens, float* logprobs,
            float* logprobs_t1) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    Draw result = draw(logits + row * stride, vocab, cutoff[row], temperature[row], static_cast<uint64_t>(keys[row]),
                       static_cast<uint32_t>(positions[row]));
    tokens[row] = result.token;
    logprobs[row] = result.logprob;
    logprobs_t1[row] = result.logprob_t1;
  }
}

template void sample(const float*, int64_t, const float*, const float*, const int64_t*, const int64_t*, int64_t,
                     int64_t, int, int64_t*, float*, float*);
template void sample(const bf16*, int64_t, const float*, const float*, const int64_t*, const int64_t*, int64_t,
                     int64_t, int, int64_t*, float*, float*);

void log_softmax(const float* x, float* out, int64_t rows, int64_t vocab, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const float* logits = x + row * vocab;
    const float top = largest_of(logits, vocab);
    LongSum total;
    for (int64_t first = 0; first < vocab; first += kStep) {
      f32x8 mass = {};
      for (int w = 0; w < 4; ++w) mass += exp_term(part(logits, vocab, first + w * kLanes) - top);
      total.add(mass);
    }
    const float log_total = total.log();
    for (int64_t at = 0; at < vocab; ++at) out[row * vocab + at] = (logits[at] - top) - log_total;
  }
}

void softmax_terms(float* x, const int64_t* targets, float temperature, int64_t rows, int64_t vocab, int threads,
                   const SoftmaxFacts& facts) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    float* logits = x + row * vocab;
    const bool same = temperature == 1.0f;
    const float top = largest_of(logits, vocab), scaled_top = top / temperature;
    LongSum total, total_t1, moment;
    for (int64_t first = 0; first < vocab; first += kStep) {
      f32x8 mass = {}, mass_t1 = {}, weighted = {};
      for (int w = 0; w < 4; ++w) {
        int64_t at = first + w * kLanes;
        if (at >= vocab) break;
        const int count = static_cast<int>(std::min<int64_t>(kLanes, vocab - at));
        f32x8 logit = part(logits, vocab, at), below = (same ? logit : logit / temperature) - scaled_top;
        f32x8 term = exp_term(below);
        if (!same) mass_t1 += exp_term(logit - top);
        mass += term;
        weighted = fma(term, max(splat(-87.0f), below), weighted);
        store(logits + at, term, count);
      }
      total.add(mass);
      if (!same) total_t1.add(mass_t1);
      moment.add(weighted);
    }
    facts.top[row] = top;
    facts.log_total[row] = total.log();
    facts.log_total_t1[row] = same ? facts.log_total[row] : total_t1.log();
    facts.total[row] = static_cast<float>(total.value());
    facts.entropy[row] = static_cast<float>(std::log(total.value()) - moment.value() / total.value());
    float& own = logits[targets[row]];
    own = static_cast<float>(own - total.value());  // exact where it has nearly all of the mass
  }
}

void random_words(const int64_t* keys, const int64_t* positions, int64_t rows, int64_t vocab, int64_t* out) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t first = 0; first < vocab; first += 4 * kLanes) {
      u32x8 words[4];
      philox(static_cast<uint64_t>(keys[row]), static_cast<uint32_t>(positions[row]), static_cast<uint32_t>(first / 4),
             words);
      to_token_order(words);
      for (int64_t i = 0; i < 4 * kLanes && first + i < vocab; ++i)
        out[row * vocab + first + i] = words[i / kLanes][i % kLanes];
    }
}

}  // namespace paceline
