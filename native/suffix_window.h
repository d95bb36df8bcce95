// The frozen level of the suffix index: a problem's recent rollouts, as places sorted by their reversed contexts.
//
// Immutable: a query holds a pointer to it while another thread makes its successor. Does not decide what is kept. 4
// bytes of text, 4 of order, 1 of common length and 0.5 of separators per token. A rollout may be in several windows:
// they share its text.
#pragma once

#include "suffix_text.h"

namespace paceline::suffix {

class Window {
 public:
  static constexpr size_t kMostBytes = size_t{1} << 30;  // by bytes_of: then places fit into 32 bits

  // `before` (may be null) without its `leave` oldest rollouts, and with `added`, which are newer, oldest first. In one
  // pass: the order of the remaining places is filtered, not sorted again. At most kMostBytes.
  static std::shared_ptr<const Window> merged(const Window* before, size_t leave, const std::vector<RolloutPtr>& added);

  // From arrays of `save`. Throws std::invalid_argument if they do not belong together.
  static std::shared_ptr<const Window> restored(std::vector<RolloutPtr> rollouts, std::vector<uint32_t> order,
                                                std::vector<uint8_t> shared);

  // A rollout's part of a window's bytes(), including its text; and the longest rollout for a number of bytes.
  static size_t bytes_of(const Rollout& rollout) { return kRolloutBytes + kTokenBytes * rollout.tokens.size(); }
  static int64_t tokens_in(size_t bytes) {
    return bytes < kRolloutBytes ? 0 : static_cast<int64_t>((bytes - kRolloutBytes) / kTokenBytes);
  }

  // Up to kWindowCandidates places with the longest common contexts (> `beyond`, >= 0), longest first. `weight_of_age`
  // [ages] is the weight of a rollout by `now` minus its version; older ones weigh as the last.
  int find(Context query, int64_t now, const std::vector<float>& weight_of_age, int beyond, Candidate* out) const;

  const std::vector<RolloutPtr>& rollouts() const { return rollouts_; }  // oldest first
  const std::vector<uint32_t>& order() const { return order_; }
  const std::vector<uint8_t>& shared() const { return shared_; }
  size_t bytes() const { return bytes_; }  // of its rollouts, by bytes_of

 private:
  // Places number the tokens of all rollouts, oldest rollout first; each begins a new block of 2^kBlockBits places.
  static constexpr int kBlockBits = 8;
  struct Block {
    const Token* text;  // of its rollout
    uint32_t start;     // the rollout's first place
    uint32_t rollout;
  };

  static uint32_t blocks_of(const Rollout& rollout) {
    return static_cast<uint32_t>(rollout.tokens.size() >> kBlockBits) + 1;
  }
  // Upper bounds: text 4, order 4, common length 1, separators 0.5 and blocks 1/16; the rest is per rollout.
  static constexpr size_t kTokenBytes = 10, kRolloutBytes = 128;
  static_assert(sizeof(Rollout) + 2 * sizeof(RolloutPtr) + sizeof(Block) + sizeof(uint64_t) <= kRolloutBytes);
  Context context(uint32_t place) const {
    const Block& block = blocks_[place >> kBlockBits];
    uint32_t at = place - block.start;
    return {block.text + at, at};
  }
  // First entry from `low` on whose context is not less than the query; and the lengths in common with it and with the
  // entry before.
  size_t rank(Context query, int& before, int& after) const;
  size_t gallop(Context query, size_t low) const;
  void number_places();
  void finish();

  std::vector<RolloutPtr> rollouts_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> order_;       // places of continuations
  std::vector<uint8_t> shared_;       // common length of an entry and the one before
  std::vector<uint64_t> separators_;  // last two tokens of every kStride-th entry
  size_t bytes_ = 0;
};

}  // namespace paceline::suffix
