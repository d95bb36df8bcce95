// The k best tokens of a row under the sampling noise, with the log-softmax of their values.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "philox.h"

namespace paceline {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// values[i] = logits[i] / T + G, -inf below the cutoff; at temperature 0 the logits themselves.
template <typename T>
void perturbed(const T* logits, int64_t vocab, float cutoff, float temperature, bool noise, uint64_t key,
               uint32_t position, float* values) {
  const bool greedy = temperature == 0.0f;
  const float divisor = greedy ? 1.0f : temperature;
  for (int64_t first = 0; first < vocab; first += 4 * kLanes) {
    u32x8 words[4] = {};
    if (noise && !greedy) {
      philox(key, position, static_cast<uint32_t>(first / 4), words);
      to_token_order(words);
    }
    for (int w = 0; w < 4; ++w) {
      int64_t at = first + w * kLanes;
      if (at >= vocab) break;
      int count = static_cast<int>(std::min<int64_t>(kLanes, vocab - at));
      f32x8 logit = load(logits + at, count);
      f32x8 scaled = select(logit < cutoff, splat(-kInfinity), logit / divisor);
      store(values + at, noise && !greedy ? scaled + gumbel(uniform(words[w])) : scaled, count);
    }
  }
}

}  // namespace

template <typename T>
void sample_topk(const T* logits, int64_t stride, const float* cutoff, const float* temperature, const int64_t* keys,
                 const int64_t* positions, int64_t rows, int64_t vocab, int64_t k, float scale, bool noise, int threads,
                 int64_t* tokens, float* logprobs) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    static thread_local std::vector<float> values;
    static thread_local std::vector<int64_t> order;
    values.resize(vocab);
    perturbed(logits + row * stride, vocab, cutoff[row], temperature[row], noise, static_cast<uint64_t>(keys[row]),
              static_cast<uint32_t>(positions[row]), values.data());
    // The k best so far, best first; a later token must be larger to come before an earlier one.
    order.clear();
    for (int64_t i = 0; i < vocab; ++i) {
      if (static_cast<int64_t>(order.size()) == k && !(values[i] > values[order.back()])) continue;
      auto place = std::find_if(order.begin(), order.end(), [&](int64_t other) { return values[i] > values[other]; });
      order.insert(place, i);
      if (static_cast<int64_t>(order.size()) > k) order.pop_back();
    }
    const float top = values[order[0]];
    LongSum total;
    for (int64_t at = 0; at < vocab; at += kLanes) {
      int count = static_cast<int>(std::min<int64_t>(kLanes, vocab - at));
      i32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
      total.add(select(lane < count, exp((load(values.data() + at, count) - top) / scale), splat(0.0f)));
    }
    const float log_total = total.log();
    for (int64_t i = 0; i < k; ++i) {
      tokens[row * k + i] = order[i];
      logprobs[row * k + i] = (values[order[i]] - top) / scale - log_total;
    }
  }
}

template void sample_topk(const float*, int64_t, const float*, const float*, const int64_t*, const int64_t*, int64_t,
                          int64_t, int64_t, float, bool, int, int64_t*, float*);
template void sample_topk(const bf16*, int64_t, const float*, const float*, const int64_t*, const int64_t*, int64_t,
                          int64_t, int64_t, float, bool, int, int64_t*, float*);

}  // namespace paceline
