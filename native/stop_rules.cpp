#include "stop_rules.h"

#include <algorithm>

namespace paceline {
namespace {

int64_t answered(const Watch& watch, int64_t found) { return std::max(found, watch.poll_from) + watch.grace; }

bool is_over(const Watch& watch, int64_t tokens) {
  if (watch.strings.found <= tokens) return true;
  if (watch.answer.found != kNowhere && answered(watch, watch.answer.found) <= tokens) return true;
  return watch.due <= tokens && watch.due < watch.answer.found;
}

// The fewest tokens with which a response can be over that is not over with `tokens`, all read.
int64_t next_wake(const Watch& watch, int64_t tokens) {
  int64_t wake = watch.strings.marker != nullptr ? tokens + 1 : kNowhere;
  if (watch.answer.marker != nullptr) wake = std::min(wake, answered(watch, std::min(watch.answer.found, tokens + 1)));
  return watch.due > tokens ? std::min(wake, watch.due) : wake;
}

void advance(Reading& reading, const int32_t* tokens, int64_t from, int64_t to) {
  if (reading.marker == nullptr || reading.found != kNowhere) return;
  const MarkerTable& marker = *reading.marker;
  for (int64_t i = from; i < to; ++i) {
    reading.state = marker.next(reading.state, tokens[i]);
    if (reading.state == marker.states - 1) {
      reading.found = i + 1;
      return;
    }
  }
}

}  // namespace

void StopReader::begin(int64_t slot, const Watch& watch) {
  end(slot);
  watches_[slot] = watch;
  watches_[slot].place = static_cast<int64_t>(active_.size());
  watches_[slot].wake = next_wake(watch, 0);
  active_.push_back(slot);
}

void StopReader::end(int64_t slot) {
  int64_t place = watches_[slot].place;
  if (place < 0) return;
  int64_t moved = active_.back();
  active_[place] = moved;
  watches_[moved].place = place;
  active_.pop_back();
  watches_[slot] = Watch{};  // its markers may be freed now
}

void StopReader::read(int64_t slot) {
  Watch& watch = watches_[slot];
  int64_t prompt = table_.prompt_length[slot], tokens = table_.length[slot] - prompt;
  if (tokens <= watch.read) return;
  const int32_t* response = table_.tokens + slot * table_.width + prompt;
  advance(watch.strings, response, watch.read, tokens);
  advance(watch.answer, response, watch.read, tokens);
  watch.read = tokens;
}

const std::vector<int64_t>& StopReader::look() {
  ending_.clear();
  for (int64_t slot : active_) {
    Watch& watch = watches_[slot];
    int64_t tokens = table_.length[slot] - table_.prompt_length[slot];
    if (tokens < watch.wake) continue;
    read(slot);
    if (is_over(watch, tokens))
      ending_.push_back(slot);
    else
      watch.wake = next_wake(watch, tokens);
  }
  return ending_;
}

const Watch& StopReader::known(int64_t slot) {
  read(slot);
  return watches_[slot];
}

}  // namespace paceline
