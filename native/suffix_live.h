// The live level of the suffix index: one running request's own text, indexed as it grows.
//
// A search tree over reversed contexts with the newest place at the root, as in LZMA's bt match finders: inserting
// splits the path to the new place, so recent places stay near the root. 12 bytes per token. One thread at a time.
#pragma once

#include "suffix_text.h"

namespace paceline::suffix {

class LiveText {
 public:
  void clear();
  void append(const Token* tokens, int64_t count);
  // Inserts the places whose next token is known. (Any other would match itself.)
  void index();
  // Up to kOwnCandidates places with the longest contexts in common with the end of the text, longest first, then
  // newest first. Pointers are valid until the next append.
  int find(float weight, Candidate* out) const;

  Context context() const { return {text_.data() + text_.size(), size()}; }
  const Token* data() const { return text_.data(); }
  int64_t size() const { return static_cast<int64_t>(text_.size()); }
  size_t bytes() const { return text_.capacity() * sizeof(Token) + links_.capacity() * sizeof(Links); }

 private:
  struct Links {
    int32_t less, greater;  // places, -1: none
  };
  void insert(int32_t place);

  std::vector<Token> text_;
  std::vector<Links> links_;  // by place
  int32_t root_ = -1;
};

}  // namespace paceline::suffix
