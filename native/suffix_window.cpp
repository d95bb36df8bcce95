#include "suffix_window.h"

#include <stdexcept>
#include <utility>

namespace paceline::suffix {
namespace {

constexpr size_t kStride = 16;  // entries per separator

struct NewPlace {
  uint64_t key;
  uint32_t place;
};

}  // namespace

std::shared_ptr<const Window> Window::merged(const Window* before, size_t leave, const std::vector<RolloutPtr>& added) {
  auto window = std::make_shared<Window>();
  if (before)
    window->rollouts_.assign(before->rollouts_.begin() + static_cast<int64_t>(leave), before->rollouts_.end());
  size_t stay = window->rollouts_.size();
  window->rollouts_.insert(window->rollouts_.end(), added.begin(), added.end());
  window->number_places();

  size_t size = 0;
  std::vector<NewPlace> places;
  std::vector<uint32_t> starts;  // of the rollouts that stay
  uint32_t start = 0;
  for (const RolloutPtr& rollout : window->rollouts_) {
    const Token* text = rollout->tokens.data();
    size += static_cast<size_t>(rollout->places());
    if (starts.size() < stay)
      starts.push_back(start);
    else
      for (uint32_t at = rollout->first_place(); at < rollout->tokens.size(); ++at)
        places.push_back({last_two({text + at, at}), start + at});
    start += blocks_of(*rollout) << kBlockBits;
  }

  const Window& w = *window;
  std::sort(places.begin(), places.end(), [&w](const NewPlace& a, const NewPlace& b) {
    if (a.key != b.key) return a.key < b.key;
    Context x = w.context(a.place), y = w.context(b.place);
    int sign = compare(x, y, common(x, y, static_cast<int>(std::min<int64_t>({2, x.size, y.size}))));
    if (sign) return sign < 0;
    return a.place > b.place;  // newest first
  });

  window->order_.reserve(size);
  window->shared_.reserve(size);
  auto emit = [&window](uint32_t place, int shared) {
    window->order_.push_back(place);
    window->shared_.push_back(static_cast<uint8_t>(shared));
  };
  size_t next = 0, old_size = before ? before->order_.size() : 0;
  // By block of `before`: the offset from an old place to a new one (modulo 2^32). Blocks of leavers come first.
  std::vector<uint32_t> moved;
  uint32_t first = 0;
  if (before) {
    for (const Block& block : before->blocks_) {
      first += block.rollout < leave;
      moved.push_back(block.rollout < leave ? 0 : starts[block.rollout - leave] - block.start);
    }
  }
  bool after_new = false;
  int shared = kContext;  // least common length since the last entry that stayed
  auto copy_until = [&](size_t end) {
    for (; next < end; ++next) {
      shared = std::min<int>(shared, before->shared_[next]);
      uint32_t place = before->order_[next], block = place >> kBlockBits;
      if (block < first) continue;
      place += moved[block];
      emit(place, after_new ? common(w.context(window->order_.back()), w.context(place)) : shared);
      shared = kContext, after_new = false;
    }
  };
  for (const NewPlace& entry : places) {
    Context context = w.context(entry.place);
    if (before) copy_until(before->gallop(context, next));
    emit(entry.place, window->order_.empty() ? 0 : common(w.context(window->order_.back()), context));
    after_new = true;
  }
  copy_until(old_size);
  if (!window->shared_.empty()) window->shared_[0] = 0;
  window->finish();
  return window;
}

std::shared_ptr<const Window> Window::restored(std::vector<RolloutPtr> rollouts, std::vector<uint32_t> order,
                                               std::vector<uint8_t> shared) {
  auto window = std::make_shared<Window>();
  window->rollouts_ = std::move(rollouts);
  window->order_ = std::move(order);
  window->shared_ = std::move(shared);
  if (window->order_.size() != window->shared_.size()) throw std::invalid_argument("arrays of different sizes");
  window->number_places();
  if (window->bytes_ > 2 * kMostBytes) throw std::invalid_argument("too many texts");
  for (uint32_t place : window->order_) {
    if (place >> kBlockBits >= window->blocks_.size()) throw std::invalid_argument("a place outside of the texts");
    const Block& block = window->blocks_[place >> kBlockBits];
    uint32_t at = place - block.start;
    if (at == 0 || at >= window->rollouts_[block.rollout]->tokens.size())
      throw std::invalid_argument("a place outside of the texts");
  }
  window->finish();
  return window;
}

void Window::number_places() {
  uint32_t start = 0, number = 0;
  size_t blocks = 0;
  for (const RolloutPtr& rollout : rollouts_) blocks += blocks_of(*rollout);
  blocks_.reserve(blocks);
  for (const RolloutPtr& rollout : rollouts_) {
    uint32_t count = blocks_of(*rollout);
    blocks_.insert(blocks_.end(), count, {rollout->tokens.data(), start, number++});
    start += count << kBlockBits;
    bytes_ += bytes_of(*rollout);
  }
}

void Window::finish() {
  separators_.reserve((order_.size() + kStride - 1) / kStride);
  for (size_t i = 0; i < order_.size(); i += kStride) separators_.push_back(last_two(context(order_[i])));
}

size_t Window::gallop(Context query, size_t low) const {
  auto less = [&](size_t i) {
    Context entry = context(order_[i]);
    return compare(entry, query, common(entry, query)) < 0;
  };
  size_t step = 1, high = low;
  while (high < order_.size() && less(high)) {
    low = high + 1;
    high += step;
    step *= 2;
  }
  high = std::min(high, order_.size());
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (less(middle))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

size_t Window::rank(Context query, int& before, int& after) const {
  uint64_t key = last_two(query);
  auto first = std::lower_bound(separators_.begin(), separators_.end(), key);
  auto last = first;  // first separator beyond the key: usually near
  for (size_t step = 1; last != separators_.end() && *last <= key; step *= 2) {
    size_t rest = static_cast<size_t>(separators_.end() - last);
    if (step >= rest || last[static_cast<int64_t>(step)] > key) {
      last = std::upper_bound(last, last + static_cast<int64_t>(std::min(step, rest)), key);
      break;
    }
    last += static_cast<int64_t>(step);
  }
  size_t begin = static_cast<size_t>(first - separators_.begin());
  size_t low = begin ? (begin - 1) * kStride : 0;
  size_t high = std::min(order_.size(), static_cast<size_t>(last - separators_.begin()) * kStride);
  size_t low_known = low, high_known = high;  // the lengths below are those of low - 1 and high if these moved
  int below = 0, above = 0;
  while (low < high) {
    size_t middle = (low + high) / 2;
    Context entry = context(order_[middle]);
    int length = common(entry, query, std::min(below, above));
    if (compare(entry, query, length) < 0)
      low = middle + 1, below = length;
    else
      high = middle, above = length;
  }
  if (low == low_known) below = low ? common(context(order_[low - 1]), query) : 0;
  if (low == high_known) above = low < order_.size() ? common(context(order_[low]), query) : 0;
  before = below, after = above;
  return low;
}

int Window::find(Context query, int64_t now, const std::vector<float>& weight_of_age, int beyond,
                 Candidate* out) const {
  if (order_.empty()) return 0;
  int left, right, count = 0;
  size_t high = rank(query, left, right), low = high;  // the next ones: low - 1 and high
  while (count < kWindowCandidates && (left > beyond || right > beyond)) {
    uint32_t place;
    int length;
    if (right >= left) {
      place = order_[high], length = right;
      right = ++high < order_.size() ? std::min<int>(right, shared_[high]) : 0;
    } else {
      place = order_[--low], length = left;
      left = low ? std::min<int>(left, shared_[low]) : 0;
    }
    const Block& block = blocks_[place >> kBlockBits];
    const Rollout& rollout = *rollouts_[block.rollout];
    int64_t at = place - block.start, age = now - rollout.version, ages = static_cast<int64_t>(weight_of_age.size());
    out[count++] = {block.text + at, static_cast<int32_t>(static_cast<int64_t>(rollout.tokens.size()) - at),
                    static_cast<int16_t>(length), age > 0 ? Origin::kOlder : Origin::kFinished,
                    weight_of_age[std::clamp<int64_t>(age, 0, ages - 1)]};
  }
  return count;
}

}  // namespace paceline::suffix
