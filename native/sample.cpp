// Gumbel-max sampling with both log-probs, in two passes over a row of logits.
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

// Tokens are taken 32 at a time: eight Philox blocks of four words. Lanes past the vocabulary hold -inf.
template <typename T>
Draw draw(const T* logits, int64_t vocab, float cutoff, float temperature, uint64_t key, uint32_t position) {
  auto part = [&](int64_t at) {
    if (at + kLanes <= vocab) return load(logits + at);
    i32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
    if (at >= vocab) return splat(-kInfinity);
    int count = static_cast<int>(vocab - at);
    return select(lane < count, load(logits + at, count), splat(-kInfinity));
  };
  f32x8 tops = splat(-kInfinity);
  for (int64_t at = 0; at < vocab; at += kLanes) tops = max(part(at), tops);
  const float top = largest(tops);
  const bool greedy = temperature == 0.0f;
  const float divisor = greedy ? 1.0f : temperature;
  const bool same = divisor == 1.0f && cutoff == -kInfinity;  // both distributions are one
  const float scaled_top = top / divisor;

  f32x8 best = splat(-kInfinity), best_index = {};  // an index below 2^31 travels as an int in float lanes
  f32x8 total = {}, total_t1 = {};
  const i32x8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  for (int64_t first = 0; first < vocab; first += 4 * kLanes) {
    u32x8 words[4] = {};
    if (!greedy) {
      philox(key, position, static_cast<uint32_t>(first / 4), words);
      to_token_order(words);
    }
    for (int w = 0; w < 4; ++w) {
      int64_t at = first + w * kLanes;
      if (at >= vocab) break;
      f32x8 logit = part(at);
      total_t1 += exp(logit - top);
      f32x8 scaled = select(logit < cutoff, splat(-kInfinity), logit / divisor);
      if (!same) total += exp(scaled - scaled_top);
      f32x8 value = greedy ? scaled : scaled + gumbel(words[w]);
      i32x8 better = value > best;
      best = select(better, value, best);
      best_index = select(better, (f32x8)(lanes + static_cast<int32_t>(at)), best_index);
    }
  }
  // The largest value; among equals the smallest token, as each lane kept its first.
  const i32x8 index = (i32x8)best_index;
  float value = best[0];
  int64_t token = index[0];
  for (int lane = 1; lane < kLanes; ++lane)
    if (best[lane] > value || (best[lane] == value && index[lane] < token)) value = best[lane], token = index[lane];

  const float chosen = load(logits + token, 1)[0];
  const float logprob_t1 = (chosen - top) - std::log(sum(total_t1));
  if (greedy) return {token, 0.0f, logprob_t1};
  return {token, same ? logprob_t1 : (chosen / divisor - scaled_top) - std::log(sum(total)), logprob_t1};
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
