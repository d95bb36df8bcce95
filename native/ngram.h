// The retrieval database of the n-gram drafter (TLT 5.3): per prompt, the earlier places of the last n tokens.
//
// Owns the texts of each prompt's responses and two hash tables over their n-grams. Never changes its inputs, and knows
// nothing of Python. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace paceline {

// Open addressing with linear probing; keys are hashes already, 0 is an empty place. Entries are never removed singly.
template <typename Value>
class HashTable {
 public:
  Value* find(uint64_t key) {
    if (entries_.empty()) return nullptr;
    Entry& entry = place(key | 1);
    return entry.key ? &entry.value : nullptr;
  }

  Value& operator[](uint64_t key) {
    if (entries_.size() * 5 < (used_ + 1) * 8) grow();
    Entry& entry = place(key | 1);
    if (!entry.key) entry.key = key | 1, ++used_;
    return entry.value;
  }

  void prefetch(uint64_t key) const {
    if (!entries_.empty()) __builtin_prefetch(&entries_[(key | 1) >> shift_]);
  }

  void clear() { *this = HashTable(); }
  size_t bytes() const { return entries_.capacity() * sizeof(Entry); }

 private:
  struct Entry {
    uint64_t key = 0;
    Value value{};
  };

  Entry& place(uint64_t key) {
    size_t mask = entries_.size() - 1;
    for (size_t i = key >> shift_;; i = (i + 1) & mask)
      if (entries_[i].key == key || !entries_[i].key) return entries_[i];
  }

  void grow() {
    std::vector<Entry> old = std::move(entries_);
    shift_ = old.empty() ? 58 : shift_ - 1;
    entries_ = std::vector<Entry>(size_t{1} << (64 - shift_));
    for (Entry& entry : old)
      if (entry.key) place(entry.key) = entry;
  }

  std::vector<Entry> entries_;
  size_t used_ = 0;
  int shift_ = 58;  // the index is the top 64 - shift bits of the key
};

struct NgramLimits {
  int64_t slots;
  int64_t max_n, min_n;      // context tokens looked up, longest first
  size_t max_bytes;          // of all groups
  int64_t kept_texts;        // finished responses per group: between this number and twice as many are kept
  int64_t kept_generations;  // a group that is unused for this many `age` calls leaves
};

// The R requests of one call, and the drafts they ask for. Arrays as in drafter/protocol.py.
struct NgramBatch {
  int64_t requests;
  const int64_t* slots;
  const int32_t* history;
  int64_t history_stride;
  const int64_t* lengths;
  const int64_t* room;
  int64_t depth, top_k, nodes;
};

class NgramIndex {
 public:
  explicit NgramIndex(const NgramLimits& limits);
  NgramIndex(const NgramIndex&) = delete;

  // A request takes `slot`. It continues the text it left unfinished, if that is the start of its response.
  void begin(int64_t slot, const int32_t* prompt, int64_t prompt_tokens, const int32_t* response, int64_t tokens);
  // The request leaves; its text stays for its siblings. `tokens` [length] is the whole sequence.
  void end(int64_t slot, const int32_t* tokens, int64_t length, bool finished);
  // A finished response from elsewhere, for a prompt that has a group here.
  void remember(const int32_t* prompt, int64_t prompt_tokens, const int32_t* response, int64_t tokens);
  // One generation (weights version) has passed.
  void age();

  // tokens, parents [R, nodes], counts [R]. False if a slot holds no request or its history shrank.
  bool propose(const NgramBatch& batch, int64_t* tokens, int64_t* parents, int64_t* counts);

  size_t bytes() const { return bytes_; }
  size_t groups() const { return groups_.size(); }

 private:
  // A response, behind the last tokens of its prompt, so that n-grams span the border.
  struct Text {
    std::vector<int32_t> tokens;
    int64_t indexed = 0;  // continuation positions below are in the tables
    bool running = false, finished = false, lagging = false;
  };
  struct Place {
    int32_t text = -1;
    uint32_t position = 0;  // of the token that followed
  };
  struct Recent {
    Place places[2];  // the last ones in two different texts, latest first
  };
  struct Group {
    uint64_t key = 0;
    std::vector<int32_t> prompt;
    std::vector<Text> texts;        // texts[0] is the prompt
    std::vector<int32_t> lagging;   // texts with tokens that are not indexed
    HashTable<uint32_t> in_text;    // (n-gram, text) -> its last position there
    HashTable<Recent> in_responses;  // n-gram -> its last places
    int64_t running = 0, generation = 0, used = 0;
    size_t bytes = 0;
    int64_t border() const;  // prompt tokens before each response
    int64_t max_n = 0;
  };
  struct Request {
    Group* group = nullptr;
    int32_t text = -1;
  };
  struct Tree;

  Group* find(const int32_t* prompt, int64_t tokens, bool create);
  void append(Group& group, int32_t text, const int32_t* tokens, int64_t count);
  void index(Group& group);
  void index(Group& group, int32_t text);
  void trim(Group& group);
  void account(Group& group);
  void make_room();
  void draft(const Request& request, Tree& tree);

  NgramLimits limits_;
  std::vector<Request> requests_;  // by slot
  std::unordered_map<uint64_t, std::unique_ptr<Group>> groups_;
  int64_t generation_ = 0, clock_ = 0;
  size_t bytes_ = 0;
};

}  // namespace paceline
