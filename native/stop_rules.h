// Tracks how far each running request's markers have been read, and which requests a stop rule may end now.
//
// actors/engine/batch/markers.py is the same in Python and documents each function. Only actors/engine/stopping.py
// decides what ends a response, and how.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline {

constexpr int64_t kNowhere = int64_t{1} << 62;  // actors.engine.stopping.NOWHERE

// contracts.rollout.Marker over a whole vocabulary.
struct MarkerTable {
  const int32_t* rows;    // [vocab], each token's row in `moves`
  const uint16_t* moves;  // [kinds, states]; the last row is that of every other token
  int64_t vocab, kinds, states;

  int64_t next(int64_t state, int64_t token) const {
    int64_t row = token >= 0 && token < vocab ? rows[token] : kinds - 1;
    return moves[row * states + state];
  }
};

// Arrays of actors.engine.batch.slots.SlotTable.
struct TokenArrays {
  const int32_t* tokens;  // [slots, width]
  const int64_t *length, *prompt_length;  // [slots]
  int64_t slots, width;
};

struct Reading {
  const MarkerTable* marker = nullptr;  // null: there is none
  int64_t state = 0, found = kNowhere;
};

// One request. `due`: the number of tokens at which its coin decides whether it is given up, or kNowhere.
struct Watch {
  Reading strings, answer;
  int64_t poll_from = 1, grace = 0, due = kNowhere;
  int64_t read = 0;  // tokens of the response
  int64_t wake = 0;  // with fewer tokens nothing can end it
  int64_t place = -1;  // in StopReader::active
};

class StopReader {
 public:
  explicit StopReader(const TokenArrays& table) : table_(table), watches_(table.slots) {}

  void begin(int64_t slot, const Watch& watch);
  void end(int64_t slot);
  // Its coin lets it continue.
  void spare(int64_t slot) { watches_[slot].due = kNowhere; }
  // Slots that a rule ends with their present tokens, or whose coin must decide; valid until the next call.
  const std::vector<int64_t>& look();
  // Reads all tokens first.
  const Watch& known(int64_t slot);
  int64_t slots() const { return table_.slots; }
  bool has(int64_t slot) const { return watches_[slot].place >= 0; }

 private:
  void read(int64_t slot);

  TokenArrays table_;
  std::vector<Watch> watches_;
  std::vector<int64_t> active_, ending_;
};

}  // namespace paceline
