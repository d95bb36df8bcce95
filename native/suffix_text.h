// Shared by the two levels of the suffix index: texts, contexts (a text read backwards from a place) and candidates.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace paceline::suffix {

using Token = int32_t;  // >= 0

constexpr int kContext = 64;  // tokens of context that are compared; a longer match counts as this long

// A finished response, immutable. The first `border` tokens are the end of its prompt: context, never a continuation.
struct Rollout {
  std::vector<Token> tokens;
  uint32_t border;
  int64_t version;    // of the target model's weights
  uint64_t sequence;  // order of arrival, unique in a store

  uint32_t first_place() const { return std::max(border, 1u); }  // the first with a context
  int64_t places() const { return static_cast<int64_t>(tokens.size()) - first_place(); }
};
using RolloutPtr = std::shared_ptr<const Rollout>;

// The tokens end[-1], end[-2], ... end[-size].
struct Context {
  const Token* end;
  int64_t size;
};

// The number of last tokens that a and b share, at most kContext; the first `from` are known to be equal.
inline int common(Context a, Context b, int from = 0) {
  int limit = static_cast<int>(std::min<int64_t>(std::min(a.size, b.size), kContext));
  int length = from;
  while (length < limit && a.end[-1 - length] == b.end[-1 - length]) ++length;
  return length;
}

// Sign of a - b in the order of reversed contexts, where a shorter one comes first; `length` is common(a, b).
inline int compare(Context a, Context b, int length) {
  if (length == kContext) return 0;
  Token x = length < a.size ? a.end[-1 - length] : -1, y = length < b.size ? b.end[-1 - length] : -1;
  return x < y ? -1 : x > y;
}

// The last two tokens of a context, ordered as contexts are.
inline uint64_t last_two(Context context) {
  uint64_t first = context.size > 0 ? static_cast<uint32_t>(context.end[-1]) + 1u : 0;
  uint64_t second = context.size > 1 ? static_cast<uint32_t>(context.end[-2]) + 1u : 0;
  return first << 32 | second;
}

// Where a proposal was found. kFinished: a rollout of the present weights' version; kOlder: of an earlier one.
enum class Origin : uint8_t { kOwn, kRunningHere, kRunningElsewhere, kFinished, kOlder, kPool };
constexpr int kOrigins = 6;

// An earlier place with a similar context: its continuation is a proposal.
struct Candidate {
  const Token* next;
  int32_t left;    // tokens known from `next` on, >= 1
  int16_t length;  // tokens of context in common, 1 .. kContext
  Origin origin;   // kOwn: the draft itself follows its end
  float weight;
};

constexpr int kWindowCandidates = 16, kOwnCandidates = 8, kSiblingCandidates = 8;
constexpr int kCandidates = kWindowCandidates + kOwnCandidates + kSiblingCandidates;
static_assert(kCandidates <= 32);  // trees hold sets of them in 32 bits

}  // namespace paceline::suffix
