// The frozen level of the suffix index: a problem's recent rollouts, as places sorted by their reversed contexts.
//
// Immutable: a query holds a pointer to it while another thread makes its successor. Owns no policy on what is kept.
// 4 bytes of text, 4 of order, 1 of common length and 0.5 of separators per token.
#pragma once

#include "suffix_text.h"

namespace paceline::suffix {

class Window {
 public:
  // A window of at most `slots` rollouts; every text is shorter than 2^32 / slots (place_tokens).
  static int64_t place_tokens(int64_t slots) { return int64_t{1} << place_bits(slots); }

  // `before` (may be null) without the rollouts that are not in `kept`, and with those that are new, in one pass:
  // the order of what stays is filtered, not made again. `kept` holds at most `slots` rollouts.
  static std::shared_ptr<const Window> merged(const Window* before, const std::vector<RolloutPtr>& kept, int64_t slots);

  // From arrays of `save`. Throws std::invalid_argument if they do not belong together.
  static std::shared_ptr<const Window> restored(std::vector<RolloutPtr> by_slot, std::vector<uint32_t> order,
                                                std::vector<uint8_t> shared, int64_t slots);

  // Up to kWindowCandidates places with the longest common contexts (>= 1), longest first. `weight_of_age` [ages] is
  // the weight of a rollout by `now` minus its version; older ones weigh as the last.
  int find(Context query, int64_t now, const std::vector<float>& weight_of_age, Candidate* out) const;

  const std::vector<RolloutPtr>& by_slot() const { return by_slot_; }  // null: free
  const std::vector<uint32_t>& order() const { return order_; }
  const std::vector<uint8_t>& shared() const { return shared_; }
  size_t bytes() const;

 private:
  static int place_bits(int64_t slots);
  Context context(uint32_t place) const {
    int64_t at = place & mask_;
    return {base_[place >> bits_] + at, at};
  }
  // First entry whose context is not less than the query, from `low` on; and the lengths in common with it and with
  // the entry before.
  size_t rank(Context query, int& before, int& after) const;
  size_t gallop(Context query, size_t low) const;
  void set_bases();
  void finish();

  int bits_ = 32;
  uint32_t mask_ = ~0u;
  std::vector<RolloutPtr> by_slot_;    // as far as they are used
  std::vector<const Token*> base_;     // by slot
  std::vector<uint32_t> order_;        // slot << bits | position of a continuation
  std::vector<uint8_t> shared_;        // common length of an entry and the one before
  std::vector<uint64_t> separators_;   // last two tokens of every kStride-th entry
};

}  // namespace paceline::suffix
