// The running level of the suffix index: texts of one problem's requests under way, here and on other workers.
//
// A search tree over the reversed contexts of all these texts, as in suffix_live.h: the newest place is the root, and
// of equal contexts the newest place stays. 28 bytes per token, at most the limit: texts do not grow beyond it. A text
// that was closed proposes nothing more; its memory is freed when all are closed. One thread at a time.
#pragma once

#include "suffix_text.h"

namespace paceline::suffix {

class GroupText {
 public:
  explicit GroupText(size_t most_bytes) : most_bytes_(most_bytes) {}

  // A new text, by its number. Its first `border` tokens, the end of the prompt, are context, never a continuation.
  int32_t open(Origin origin, const Token* border, int64_t tokens);
  void append(int32_t text, const Token* tokens, int64_t count);
  void close(int32_t text);

  int64_t size(int32_t text) const { return static_cast<int64_t>(texts_[text].tokens.size()); }
  int64_t opened() const { return open_; }
  size_t bytes() const { return bytes_; }

  // Up to kSiblingCandidates places of open texts other than `without` with the longest contexts in common with the
  // query, longest first, then newest first. Pointers are valid until the next append.
  int find(Context query, int32_t without, float weight, Candidate* out) const;

 private:
  struct Text {
    std::vector<Token> tokens;
    int64_t indexed;  // places from here on are not in the tree yet
    Origin origin;
    bool open;
  };
  struct Node {
    int32_t text, place;
    int32_t less, greater;  // nodes, -1: none
    uint64_t last;          // last_two of its context: most comparisons end here
  };
  // Sign and common length of a node's context and a query with the last two tokens `last`; the first `from` are equal.
  int order(const Node& node, Context query, uint64_t last, int from, int& length) const {
    if (from < 2 && node.last != last) {
      length = node.last >> 32 == last >> 32 && last >> 32 ? 1 : 0;
      return node.last < last ? -1 : 1;
    }
    Context other = context(node);
    length = common(other, query, from);
    return compare(other, query, length);
  }
  void insert(int32_t text, int32_t place);
  Context context(const Node& node) const { return {texts_[node.text].tokens.data() + node.place, node.place}; }

  size_t most_bytes_, bytes_ = 0;
  std::vector<Text> texts_;
  std::vector<Node> nodes_;
  int32_t root_ = -1;
  int64_t open_ = 0;
};

}  // namespace paceline::suffix
