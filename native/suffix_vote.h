// Turns candidates into a draft: the continuation on which they agree, and its probability.
#pragma once

#include "suffix_text.h"

namespace paceline::suffix {

struct DraftShape {
  int depth = 0, top_k = 1, nodes = 0;
  float min_probability = 0.1f;
  float match_factor = 1;  // most tokens of draft per token of match
};

// Node i: tokens[i] after node parents[i] < i (-1: the last known token), on a path of estimated probability probs[i].
struct DraftOut {
  int64_t* tokens;
  int64_t* parents;
  float* probs;     // may be null
  Origin* origins;  // of the longest match that proposes the token; may be null
};

// The draft of `candidates` (sorted by length, longest first; at most kCandidates), at most shape.nodes nodes.
//
// Chain (top_k 1): for each distinct length, longest first, candidates of at least that length vote token by token. The
// path's probability is the share of the weight that still agrees. The match's length limits the draft. The length with
// the greatest sum of probabilities (the expected accepted tokens) wins, the longer one at a tie.
//
// Tree: best-first by probability over all candidates, where each token of match multiplies a candidate's weight.
int draft(Candidate* candidates, int count, const DraftShape& shape, const DraftOut& out);

}  // namespace paceline::suffix
