#include "suffix_live.h"

#include "suffix_tree.h"

namespace paceline::suffix {
namespace {

template <typename T>
void reserve(std::vector<T>& vector, size_t size) {
  if (vector.capacity() < size) vector.reserve(std::max<size_t>({size, vector.capacity() + vector.capacity() / 4, 64}));
}

}  // namespace

void LiveText::clear() {
  text_.clear();
  links_.clear();
  root_ = -1;
}

void LiveText::append(const Token* tokens, int64_t count) {
  reserve(text_, text_.size() + static_cast<size_t>(count));
  text_.insert(text_.end(), tokens, tokens + count);
}

void LiveText::index() {
  reserve(links_, text_.size());
  if (links_.empty() && !text_.empty()) links_.push_back({-1, -1});  // place 0 has no context
  for (size_t place = links_.size(); place < text_.size(); ++place) insert(static_cast<int32_t>(place));
}

void LiveText::insert(int32_t place) {
  links_.push_back({-1, -1});
  Context context{text_.data() + place, place};
  make_root(links_, root_, [&](int32_t node, int from, int& length) {
    Context other{text_.data() + node, node};
    length = common(other, context, from);
    return compare(other, context, length);
  });
}

int LiveText::find(float weight, Candidate* out) const {
  Context context = this->context();
  int32_t node = root_;
  int below = 0, above = 0, count = 0;
  for (int steps = kSteps; node >= 0 && steps; --steps) {
    Context other{text_.data() + node, node};
    int length = common(other, context, std::min(below, above));
    int sign = compare(other, context, length);
    // Nodes are met newest first within a subtree; a longer match goes before all shorter ones.
    if (length > 0 && (count < kOwnCandidates || out[count - 1].length < length)) {
      int at = count < kOwnCandidates ? count++ : count - 1;
      for (; at > 0 && out[at - 1].length < length; --at) out[at] = out[at - 1];
      out[at] = {text_.data() + node, static_cast<int32_t>(size() - node), static_cast<int16_t>(length),
                 Origin::kOwn, weight};
    }
    if (sign == 0) break;
    (sign < 0 ? below : above) = length;
    node = sign < 0 ? links_[node].greater : links_[node].less;
  }
  return count;
}

}  // namespace paceline::suffix
