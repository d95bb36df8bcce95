#include "suffix_group.h"

#include "suffix_tree.h"

namespace paceline::suffix {

int32_t GroupText::open(Origin origin, const Token* border, int64_t tokens) {
  texts_.push_back({{border, border + tokens}, std::max<int64_t>(tokens, 1), origin, true});
  ++open_;
  bytes_ += sizeof(Text) + static_cast<size_t>(tokens) * sizeof(Token);
  return static_cast<int32_t>(texts_.size()) - 1;
}

void GroupText::append(int32_t text, const Token* tokens, int64_t count) {
  constexpr size_t each = sizeof(Token) + sizeof(Node);
  Text& target = texts_[text];
  int64_t room = bytes_ < most_bytes_ ? static_cast<int64_t>((most_bytes_ - bytes_) / each) : 0;
  count = std::min(count, room);
  if (count <= 0) return;
  target.tokens.insert(target.tokens.end(), tokens, tokens + count);
  bytes_ += static_cast<size_t>(count) * each;
  for (; target.indexed < static_cast<int64_t>(target.tokens.size()); ++target.indexed)
    insert(text, static_cast<int32_t>(target.indexed));
}

void GroupText::close(int32_t text) {
  texts_[text].open = false;
  if (--open_) return;
  std::vector<Text>().swap(texts_);
  std::vector<Node>().swap(nodes_);
  root_ = -1;
  bytes_ = 0;
}

void GroupText::insert(int32_t text, int32_t place) {
  Context context{texts_[text].tokens.data() + place, place};
  uint64_t last = last_two(context);
  nodes_.push_back({text, place, -1, -1, last});
  make_root(nodes_, root_, [&](int32_t node, int from, int& length) {
    return order(nodes_[node], context, last, from, length);
  });
}

int GroupText::find(Context query, int32_t without, float weight, Candidate* out) const {
  int32_t node = root_;
  uint64_t last = last_two(query);
  int below = 0, above = 0, count = 0;
  for (int steps = kSteps; node >= 0 && steps; --steps) {
    const Node& here = nodes_[node];
    int length, sign = order(here, query, last, std::min(below, above), length);
    bool longer = length > 0 && (count < kSiblingCandidates || out[count - 1].length < length);
    if (longer && here.text != without && texts_[here.text].open) {
      const Text& text = texts_[here.text];
      int at = count < kSiblingCandidates ? count++ : count - 1;
      for (; at > 0 && out[at - 1].length < length; --at) out[at] = out[at - 1];
      out[at] = {text.tokens.data() + here.place,
                 static_cast<int32_t>(static_cast<int64_t>(text.tokens.size()) - here.place),
                 static_cast<int16_t>(length), text.origin, weight};
    }
    if (sign == 0) break;
    (sign < 0 ? below : above) = length;
    node = sign < 0 ? here.greater : here.less;
  }
  return count;
}

}  // namespace paceline::suffix
