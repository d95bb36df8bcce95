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

int Window::place_bits(int64_t slots) {
  int bits = 32;
  while ((int64_t{1} << (32 - bits)) < slots) --bits;
  return bits;
}

std::shared_ptr<const Window> Window::merged(const Window* before, const std::vector<RolloutPtr>& kept, int64_t slots) {
  auto window = std::make_shared<Window>();
  window->bits_ = place_bits(slots);
  window->mask_ = static_cast<uint32_t>((uint64_t{1} << window->bits_) - 1);
  window->by_slot_.resize(slots);
  // Who stays keeps its slot, so that its entries stay as they are.
  std::vector<RolloutPtr> added;
  for (const RolloutPtr& rollout : kept) {
    int64_t slot = -1;
    if (before)
      slot = std::find(before->by_slot_.begin(), before->by_slot_.end(), rollout) - before->by_slot_.begin();
    if (slot >= 0 && slot < static_cast<int64_t>(before->by_slot_.size()))
      window->by_slot_[slot] = rollout;
    else
      added.push_back(rollout);
  }
  size_t size = 0;
  for (const RolloutPtr& rollout : kept) size += rollout->tokens.size() - rollout->border;
  std::vector<NewPlace> places;
  auto free = window->by_slot_.begin();
  for (const RolloutPtr& rollout : added) {
    free = std::find(free, window->by_slot_.end(), nullptr);
    *free = rollout;
    uint32_t base = static_cast<uint32_t>(static_cast<uint64_t>(free - window->by_slot_.begin()) << window->bits_);
    const Token* text = rollout->tokens.data();
    for (int64_t at = std::max<int64_t>(rollout->border, 1); at < static_cast<int64_t>(rollout->tokens.size()); ++at)
      places.push_back({last_two({text + at, at}), base | static_cast<uint32_t>(at)});
  }
  while (!window->by_slot_.empty() && !window->by_slot_.back()) window->by_slot_.pop_back();
  window->by_slot_.shrink_to_fit();
  window->set_bases();

  const Window& w = *window;
  std::sort(places.begin(), places.end(), [&w](const NewPlace& a, const NewPlace& b) {
    if (a.key != b.key) return a.key < b.key;
    Context x = w.context(a.place), y = w.context(b.place);
    int sign = compare(x, y, common(x, y, static_cast<int>(std::min<int64_t>({2, x.size, y.size}))));
    if (sign) return sign < 0;
    uint64_t s = w.by_slot_[a.place >> w.bits_]->sequence, t = w.by_slot_[b.place >> w.bits_]->sequence;
    return s != t ? s > t : a.place > b.place;  // newest first
  });

  window->order_.reserve(size);
  window->shared_.reserve(size);
  auto emit = [&window](uint32_t place, int shared) {
    window->order_.push_back(place);
    window->shared_.push_back(static_cast<uint8_t>(shared));
  };
  size_t next = 0, old_size = before ? before->order_.size() : 0;
  std::vector<uint8_t> stays(slots, 0);
  for (int64_t slot = 0; before && slot < static_cast<int64_t>(before->by_slot_.size()); ++slot)
    stays[slot] = before->by_slot_[slot] && before->by_slot_[slot] == window->by_slot_[slot];
  bool after_new = false;
  int shared = kContext;  // least common length since the last entry that stayed
  auto copy_until = [&](size_t end) {
    for (; next < end; ++next) {
      shared = std::min<int>(shared, before->shared_[next]);
      uint32_t place = before->order_[next];
      if (!stays[place >> w.bits_]) continue;
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

std::shared_ptr<const Window> Window::restored(std::vector<RolloutPtr> by_slot, std::vector<uint32_t> order,
                                               std::vector<uint8_t> shared, int64_t slots) {
  auto window = std::make_shared<Window>();
  window->bits_ = place_bits(slots);
  window->mask_ = static_cast<uint32_t>((uint64_t{1} << window->bits_) - 1);
  window->by_slot_ = std::move(by_slot);
  window->order_ = std::move(order);
  window->shared_ = std::move(shared);
  if (static_cast<int64_t>(window->by_slot_.size()) > slots || window->order_.size() != window->shared_.size())
    throw std::invalid_argument("arrays of different sizes");
  window->set_bases();
  for (uint32_t place : window->order_) {
    size_t slot = static_cast<size_t>(static_cast<uint64_t>(place) >> window->bits_);
    if (slot >= window->by_slot_.size() || !window->by_slot_[slot] || (place & window->mask_) == 0 ||
        (place & window->mask_) >= window->by_slot_[slot]->tokens.size())
      throw std::invalid_argument("a place outside of the texts");
  }
  window->finish();
  return window;
}

void Window::set_bases() {
  base_.reserve(by_slot_.size());
  for (const RolloutPtr& rollout : by_slot_) base_.push_back(rollout ? rollout->tokens.data() : nullptr);
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

int Window::find(Context query, int64_t now, const std::vector<float>& weight_of_age, Candidate* out) const {
  if (order_.empty()) return 0;
  int left, right, count = 0;
  size_t high = rank(query, left, right), low = high;  // the next ones: low - 1 and high
  while (count < kWindowCandidates && (left > 0 || right > 0)) {
    uint32_t place;
    int length;
    if (right >= left) {
      place = order_[high], length = right;
      right = ++high < order_.size() ? std::min<int>(right, shared_[high]) : 0;
    } else {
      place = order_[--low], length = left;
      left = low ? std::min<int>(left, shared_[low]) : 0;
    }
    const Rollout& rollout = *by_slot_[place >> bits_];
    int64_t at = place & mask_, age = now - rollout.version, ages = static_cast<int64_t>(weight_of_age.size());
    out[count++] = {rollout.tokens.data() + at, static_cast<int32_t>(rollout.tokens.size() - at),
                    static_cast<int16_t>(length), false, weight_of_age[std::clamp<int64_t>(age, 0, ages - 1)]};
  }
  return count;
}

size_t Window::bytes() const {
  size_t total = sizeof(Window) + order_.capacity() * sizeof(uint32_t) + shared_.capacity() +
                 separators_.capacity() * sizeof(uint64_t) + by_slot_.capacity() * sizeof(RolloutPtr) +
                 base_.capacity() * sizeof(Token*);
  for (const RolloutPtr& rollout : by_slot_)
    if (rollout) total += sizeof(Rollout) + rollout->tokens.capacity() * sizeof(Token);
  return total;
}

}  // namespace paceline::suffix
