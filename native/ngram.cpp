#include "ngram.h"

#include <algorithm>
#include <utility>

namespace paceline {
namespace {

// A match of one token is weak evidence: following it to the end drafts half as much again for a tenth more accepted.
constexpr int64_t kSingleTokenDepth = 2;

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  hash ^= hash >> 29;
  hash *= 0xBF58476D1CE4E5B9u;
  return hash ^ (hash >> 32);
}

// The hashes of the n tokens before `end`, n = 1 .. count, in one pass backwards.
struct Hashes {
  Hashes(const int32_t* end, int64_t count) {
    uint64_t hash = 0x243F6A8885A308D3u;
    for (int64_t n = 1; n <= count; ++n) of[n] = hash = mix(hash, static_cast<uint32_t>(end[-n]));
  }
  uint64_t of[17];
};

uint64_t with_text(uint64_t hash, int32_t text) { return mix(hash, 0x100000000u + static_cast<uint32_t>(text)); }

}  // namespace

// The draft of one request: paths of at most `depth` tokens, merged at common prefixes.
struct NgramIndex::Tree {
  int64_t depth, top_k, nodes;
  int64_t* tokens;
  int64_t* parents;
  int64_t count = 0;
  std::vector<int64_t>& path;

  bool full() const { return count >= nodes || (top_k == 1 && count > 0); }

  void add() {
    int64_t node = -1;
    for (int64_t token : path) {
      int64_t child = -1, children = 0;
      for (int64_t i = node + 1; i < count; ++i)
        if (parents[i] == node) {
          ++children;
          if (tokens[i] == token) child = i;
        }
      if (child < 0) {
        if (children >= top_k || count >= nodes) return;
        child = count++;
        tokens[child] = token;
        parents[child] = node;
      }
      node = child;
    }
  }
};

int64_t NgramIndex::Group::border() const { return std::min<int64_t>(max_n, prompt.size()); }

NgramIndex::NgramIndex(const NgramLimits& limits) : limits_(limits), requests_(limits.slots) {}

NgramIndex::Group* NgramIndex::find(const int32_t* prompt, int64_t tokens, bool create) {
  uint64_t key = mix(0x13198A2E03707344u, static_cast<uint64_t>(tokens));
  for (int64_t i = 0; i < tokens; ++i) key = mix(key, static_cast<uint32_t>(prompt[i]));
  for (;; ++key) {  // A colliding prompt takes the next key.
    auto found = groups_.find(key);
    if (found == groups_.end()) break;
    std::vector<int32_t>& other = found->second->prompt;
    if (static_cast<int64_t>(other.size()) == tokens && std::equal(other.begin(), other.end(), prompt))
      return found->second.get();
  }
  if (!create) return nullptr;
  auto group = std::make_unique<Group>();
  group->key = key;
  group->max_n = limits_.max_n;
  group->prompt.assign(prompt, prompt + tokens);
  group->texts.emplace_back();
  append(*group, 0, prompt, tokens);
  return (groups_[key] = std::move(group)).get();
}

void NgramIndex::append(Group& group, int32_t text, const int32_t* tokens, int64_t count) {
  Text& target = group.texts[text];
  if (count <= 0) return;
  target.tokens.insert(target.tokens.end(), tokens, tokens + count);
  if (!target.lagging) group.lagging.push_back(text);
  target.lagging = true;
}

void NgramIndex::begin(int64_t slot, const int32_t* prompt, int64_t prompt_tokens, const int32_t* response,
                       int64_t tokens) {
  if (requests_[slot].group) end(slot, nullptr, 0, false);
  Group& group = *find(prompt, prompt_tokens, true);
  int64_t border = group.border();
  int32_t text = -1;
  for (size_t i = 1; tokens && text < 0 && i < group.texts.size(); ++i) {
    Text& left = group.texts[i];
    int64_t known = static_cast<int64_t>(left.tokens.size()) - border;
    if (left.running || left.finished || known > tokens) continue;
    if (std::equal(response, response + known, left.tokens.begin() + border)) text = static_cast<int32_t>(i);
  }
  if (text < 0) {
    text = static_cast<int32_t>(group.texts.size());
    group.texts.emplace_back();
    group.texts[text].tokens.assign(group.prompt.end() - border, group.prompt.end());
  }
  Text& mine = group.texts[text];
  mine.running = true;
  int64_t known = static_cast<int64_t>(mine.tokens.size()) - border;
  append(group, text, response + known, tokens - known);
  ++group.running;
  group.generation = generation_;
  group.used = ++clock_;
  requests_[slot] = {&group, text};
  account(group);
}

void NgramIndex::end(int64_t slot, const int32_t* tokens, int64_t length, bool finished) {
  Request request = std::exchange(requests_[slot], Request());
  if (!request.group) return;
  Group& group = *request.group;
  Text& text = group.texts[request.text];
  int64_t known = static_cast<int64_t>(group.prompt.size() - group.border() + text.tokens.size());
  append(group, request.text, tokens + known, length - known);
  text.running = false;
  text.finished = finished;
  --group.running;
  group.generation = generation_;
  account(group);
  trim(group);
  make_room();
}

void NgramIndex::remember(const int32_t* prompt, int64_t prompt_tokens, const int32_t* response, int64_t tokens) {
  Group* group = find(prompt, prompt_tokens, false);
  if (!group) return;
  int32_t text = static_cast<int32_t>(group->texts.size());
  group->texts.emplace_back();
  group->texts[text].tokens.assign(group->prompt.end() - group->border(), group->prompt.end());
  group->texts[text].finished = true;
  append(*group, text, response, tokens);
  account(*group);
  trim(*group);
  make_room();
}

// Drops texts once twice as many as kept_texts have ended; the next proposal indexes the others again.
void NgramIndex::trim(Group& group) {
  int64_t ended = static_cast<int64_t>(group.texts.size()) - 1 - group.running;
  if (ended <= 2 * limits_.kept_texts) return;
  int64_t surplus = ended - limits_.kept_texts;
  std::vector<int32_t> moved(group.texts.size(), -1);
  std::vector<Text> kept;
  group.lagging.clear();
  for (size_t i = 0; i < group.texts.size(); ++i) {
    Text& text = group.texts[i];
    if (i > 0 && !text.running && surplus-- > 0) continue;
    moved[i] = static_cast<int32_t>(kept.size());
    text.indexed = 0;
    text.lagging = true;
    group.lagging.push_back(moved[i]);
    kept.push_back(std::move(text));
  }
  group.texts = std::move(kept);
  group.in_text.clear();
  group.in_responses.clear();
  for (Request& request : requests_)
    if (request.group == &group) request.text = moved[request.text];
  account(group);
}

void NgramIndex::age() {
  ++generation_;
  for (auto place = groups_.begin(); place != groups_.end();) {
    Group& group = *place->second;
    if (group.running == 0 && group.generation + limits_.kept_generations < generation_) {
      bytes_ -= group.bytes;
      place = groups_.erase(place);
    } else {
      ++place;
    }
  }
}

void NgramIndex::account(Group& group) {
  size_t bytes = sizeof(Group) + group.in_text.bytes() + group.in_responses.bytes();
  bytes += group.prompt.capacity() * sizeof(int32_t);
  for (const Text& text : group.texts) bytes += sizeof(Text) + text.tokens.capacity() * sizeof(int32_t);
  bytes_ += bytes - group.bytes;
  group.bytes = bytes;
}

// Drops groups without running requests, least recently used first.
void NgramIndex::make_room() {
  while (bytes_ > limits_.max_bytes) {
    auto oldest = groups_.end();
    for (auto place = groups_.begin(); place != groups_.end(); ++place)
      if (place->second->running == 0 && (oldest == groups_.end() || place->second->used < oldest->second->used))
        oldest = place;
    if (oldest == groups_.end()) return;
    bytes_ -= oldest->second->bytes;
    groups_.erase(oldest);
  }
}

void NgramIndex::index(Group& group) {
  size_t before = group.in_text.bytes() + group.in_responses.bytes();
  for (int32_t text : group.lagging) index(group, text);
  group.lagging.clear();
  size_t grown = group.in_text.bytes() + group.in_responses.bytes() - before;
  group.bytes += grown;
  bytes_ += grown;
}

// Enters an n-gram once the token after it is known: so a text never finds its own end.
void NgramIndex::index(Group& group, int32_t text) {
  Text& source = group.texts[text];
  source.lagging = false;
  const int32_t* tokens = source.tokens.data();
  int64_t border = text == 0 ? 0 : group.border();
  for (int64_t p = std::max(source.indexed, border); p < static_cast<int64_t>(source.tokens.size()); ++p) {
    int64_t longest = std::min(limits_.max_n, p);
    Hashes hashes(tokens + p, longest);
    for (int64_t n = limits_.min_n; n <= longest; ++n) {
      group.in_text[with_text(hashes.of[n], text)] = static_cast<uint32_t>(p);
      if (text == 0) continue;
      Recent& recent = group.in_responses[hashes.of[n]];
      if (recent.places[0].text != text) recent.places[1] = recent.places[0];
      recent.places[0] = {text, static_cast<uint32_t>(p)};
    }
  }
  source.indexed = static_cast<int64_t>(source.tokens.size());
}

bool NgramIndex::propose(const NgramBatch& batch, int64_t* tokens, int64_t* parents, int64_t* counts) {
  if (bytes_ > limits_.max_bytes) make_room();
  for (int64_t r = 0; r < batch.requests; ++r) {
    int64_t slot = batch.slots[r];
    if (slot < 0 || slot >= limits_.slots || !requests_[slot].group) return false;
    Group& group = *requests_[slot].group;
    int32_t text = requests_[slot].text;
    int64_t known = static_cast<int64_t>(group.prompt.size() - group.border() + group.texts[text].tokens.size());
    if (batch.lengths[r] < known) return false;
    append(group, text, batch.history + slot * batch.history_stride + known, batch.lengths[r] - known);
    // Beyond the limit nothing more is entered until requests have left.
    if (bytes_ <= limits_.max_bytes) index(group);
  }
  std::vector<int64_t> path;
  for (int64_t r = 0; r < batch.requests; ++r) {
    const Request& request = requests_[batch.slots[r]];
    int64_t depth = std::min(batch.depth, batch.room[r]);
    Tree tree{depth, batch.top_k, batch.nodes, tokens + r * batch.nodes, parents + r * batch.nodes, 0, path};
    if (depth > 0) draft(request, tree);
    counts[r] = tree.count;
  }
  return true;
}

void NgramIndex::draft(const Request& request, Tree& tree) {
  Group& group = *request.group;
  const std::vector<int32_t>& own = group.texts[request.text].tokens;
  int64_t prompt = static_cast<int64_t>(group.prompt.size()), border = group.border();
  int64_t length = prompt - border + static_cast<int64_t>(own.size());
  // Proposes the request's own sequence from a position on; past its end the draft itself repeats.
  auto follow_own = [&](int64_t position) {
    tree.path.clear();
    for (int64_t i = 0; i < tree.depth; ++i) {
      int64_t p = position + i;
      tree.path.push_back(p < prompt ? group.prompt[p] : p < length ? own[p - prompt + border] : tree.path[p - length]);
    }
    tree.add();
  };
  auto follow = [&](const Place& place) {
    const std::vector<int32_t>& text = group.texts[place.text].tokens;
    int64_t end = std::min<int64_t>(text.size(), place.position + tree.depth);
    tree.path.assign(text.begin() + place.position, text.begin() + end);
    tree.add();
  };
  int64_t longest = std::min<int64_t>(limits_.max_n, own.size());
  Hashes hashes(own.data() + own.size(), longest);
  for (int64_t n = limits_.min_n; n <= longest; ++n) {
    group.in_text.prefetch(with_text(hashes.of[n], request.text));
    group.in_responses.prefetch(hashes.of[n]);
    group.in_text.prefetch(with_text(hashes.of[n], 0));
  }
  int64_t whole = tree.depth;
  for (int64_t n = longest; n >= limits_.min_n && !tree.full(); --n) {
    tree.depth = n == 1 ? std::min(whole, kSingleTokenDepth) : whole;
    if (const uint32_t* p = group.in_text.find(with_text(hashes.of[n], request.text))) follow_own(prompt - border + *p);
    if (const Recent* recent = group.in_responses.find(hashes.of[n]))
      for (const Place& place : recent->places)
        if (!tree.full() && place.text >= 0 && place.text != request.text) follow(place);
    if (tree.full()) break;
    if (const uint32_t* p = group.in_text.find(with_text(hashes.of[n], 0))) follow_own(*p);
  }
}

}  // namespace paceline
