#include "suffix_vote.h"

#include <cmath>

namespace paceline::suffix {
namespace {

constexpr int kLevels = 8, kMaxDepth = 64;
constexpr float kLevelBase = 1.3f, kTreeBase = 3.0f;
constexpr int kBaseTokens = 12;  // the weight of a match grows up to this length

struct Powers {
  float level[kBaseTokens + 1], tree[kBaseTokens + 1];
  Powers() {
    for (int i = 0; i <= kBaseTokens; ++i) level[i] = std::pow(kLevelBase, i), tree[i] = std::pow(kTreeBase, i);
  }
};
const Powers kPowers;

// Candidate c's proposal `depth` tokens on, on a path `before` [depth]; -1: nothing.
inline Token proposal(const Candidate& c, int depth, const Token* before) {
  if (depth < c.left) return c.next[depth];
  return c.origin == Origin::kOwn ? before[depth - c.left] : -1;
}

// The first of a set of candidates, which is not empty.
inline int lowest(uint32_t active) {
  int first = 0;
  while (!(active >> first & 1)) ++first;
  return first;
}

// The number of tokens that a match of `length` may draft.
inline int reach(int length, const DraftShape& shape) {
  return static_cast<int>(static_cast<float>(length) * shape.match_factor);
}

// The chain of the first `count` candidates. Returns its length.
int vote(const Candidate* candidates, const float* weights, int count, int depth, float min_probability, Token* tokens,
         float* probs, Origin* origins, float& score) {
  uint8_t active[kCandidates];
  float total = 0;
  for (int i = 0; i < count; ++i) active[i] = static_cast<uint8_t>(i), total += weights[i];
  float scale = 1.0f / total;
  score = 0;
  int length = 0;
  Token seen[kCandidates], proposed[kCandidates];
  float sums[kCandidates];
  while (length < depth && count) {
    int kinds = 0, best = -1;
    for (int i = 0; i < count; ++i) {
      Token token = proposed[i] = proposal(candidates[active[i]], length, tokens);
      if (token < 0) continue;
      int kind = 0;
      while (kind < kinds && seen[kind] != token) ++kind;
      if (kind == kinds) seen[kinds] = token, sums[kinds++] = 0;
      sums[kind] += weights[active[i]];
    }
    for (int kind = 0; kind < kinds; ++kind)
      if (best < 0 || sums[kind] > sums[best]) best = kind;
    if (best < 0 || sums[best] * scale < min_probability) break;
    int left = 0;
    for (int i = 0; i < count; ++i)
      if (proposed[i] == seen[best]) active[left++] = active[i];
    count = left;
    tokens[length] = seen[best];
    origins[length] = candidates[active[0]].origin;
    probs[length] = std::min(1.0f, sums[best] * scale);
    score += probs[length++];
  }
  return length;
}

int chain(const Candidate* candidates, int count, const DraftShape& shape, const DraftOut& out) {
  float weights[kCandidates];
  for (int i = 0; i < count; ++i)
    weights[i] = candidates[i].weight * kPowers.level[std::min<int>(candidates[i].length, kBaseTokens)];
  Token tokens[2][kMaxDepth];
  float probs[2][kMaxDepth], best_score = 0;
  Origin origins[2][kMaxDepth];
  int best = 0, length = 0, end = 0;
  for (int levels = 0; levels < kLevels && end < count; ++levels) {
    int match = candidates[end].length, depth = std::min({shape.depth, reach(match, shape), kMaxDepth});
    if (depth <= best_score) break;  // no probability exceeds one
    while (end < count && candidates[end].length == match) ++end;
    float score;
    int drafted = vote(candidates, weights, end, depth, shape.min_probability, tokens[1 - best], probs[1 - best],
                       origins[1 - best], score);
    if (score > best_score) best = 1 - best, best_score = score, length = drafted;
  }
  for (int i = 0; i < length; ++i) {
    out.tokens[i] = tokens[best][i];
    out.parents[i] = i - 1;
    if (out.probs) out.probs[i] = probs[best][i];
    if (out.origins) out.origins[i] = origins[best][i];
  }
  return length;
}

struct Node {
  uint32_t active;  // candidates that agree with its path
  float weight;
  int32_t parent;  // in the draft
  Token token;
  int32_t depth;  // tokens of the path with this one
};

int tree(const Candidate* candidates, int count, const DraftShape& shape, const DraftOut& out) {
  float weights[kCandidates], total = 0;
  for (int i = 0; i < count; ++i) {
    weights[i] = candidates[i].weight * kPowers.tree[std::min<int>(candidates[i].length, kBaseTokens)];
    total += weights[i];
  }
  if (count == 0) return 0;
  std::vector<Node> frontier;
  frontier.reserve(64);
  int drafted = 0;
  Token path[kMaxDepth];
  Node node{static_cast<uint32_t>((uint64_t{1} << count) - 1), total, -1, -1, 0};
  for (int index = -1;; index = drafted - 1) {
    if (node.depth < std::min(shape.depth, kMaxDepth)) {
      for (int at = index, d = node.depth - 1; d >= 0; --d, at = static_cast<int>(out.parents[at]))
        path[d] = static_cast<Token>(out.tokens[at]);
      Node children[kCandidates];
      int kinds = 0;
      for (int i = 0; i < count; ++i) {
        if (!(node.active >> i & 1) || reach(candidates[i].length, shape) <= node.depth) continue;
        Token token = proposal(candidates[i], node.depth, path);
        if (token < 0) continue;
        int kind = 0;
        while (kind < kinds && children[kind].token != token) ++kind;
        if (kind == kinds) children[kinds++] = {0, 0, index, token, node.depth + 1};
        children[kind].active |= 1u << i;
        children[kind].weight += weights[i];
      }
      auto heavier = [](const Node& a, const Node& b) { return a.weight > b.weight; };
      std::stable_sort(children, children + kinds, heavier);
      for (int kind = 0; kind < std::min(kinds, shape.top_k); ++kind)
        if (children[kind].weight >= shape.min_probability * total) frontier.push_back(children[kind]);
    }
    if (drafted == shape.nodes || frontier.empty()) return drafted;
    auto best = std::max_element(frontier.begin(), frontier.end(),
                                 [](const Node& a, const Node& b) { return a.weight < b.weight; });
    node = *best;
    frontier.erase(best);
    out.tokens[drafted] = node.token;
    out.parents[drafted] = node.parent;
    if (out.probs) out.probs[drafted] = std::min(1.0f, node.weight / total);
    if (out.origins) out.origins[drafted] = candidates[lowest(node.active)].origin;
    ++drafted;
  }
}

}  // namespace

int draft(Candidate* candidates, int count, const DraftShape& shape, const DraftOut& out) {
  return shape.top_k > 1 ? tree(candidates, count, shape, out) : chain(candidates, count, shape, out);
}

}  // namespace paceline::suffix
