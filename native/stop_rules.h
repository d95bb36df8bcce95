// How far each running request's markers have been read, and which requests a stop rule may end now.
//
// actors/engine/batch/markers.py is the same in Python and says what each function does; what ends a response, and how,
// is decided by actors/engine/stopping.py alone.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline {

constexpr int64_t kNowhere = int64_t{1} << 62;  // actors.engine.stopping.NOWHERE

// contracts.rollout.Marker over a whole vocabulary.
struct MarkerTable {
  const int32_t* rows;    // [vocab], the row of `moves` that a token has
  const uint16_t* moves;  // [kinds, states]; the last row is that of every other token
  int64_t vocab, kinds, states;

  int64_t next(int64_t state, int64_t token) const {
    int64_t row = token >= 0 && token < vocab ? rows[token] : kinds - 1;
    return moves[row * states + state];
  }
};

// Of actors.engine.batch.slots.SlotTable.
struct TokenArrays {
  const int32_t* tokens;  // [slots, width]
  const int64_t *length, *prompt_length;  // [slots]
  int64_t slots, width;
};

struct Reading {
  const MarkerTable* marker = nullptr;  // null: there is none
  int64_t state = 0, found = kNowhere;
};

// One request. `due`: tokens with which its coin is asked whether it is given up, kNowhere if it never is.
struct Watch {
  Reading strings, answer;
  int64_t poll_from = 1, grace = 0, due = kNowhere;
  int64_t read = 0;  // tokens of the response
  int64_t wake = 0;  // with fewer tokens than these nothing can end it
  int64_t place = -1;  // in StopReader::active
};

class StopReader {
 public:
  explicit StopReader(const TokenArrays& table) : table_(table), watches_(table.slots) {}

  void begin(int64_t slot, const Watch& watch);
  void end(int64_t slot);
  // Its coin lets it run on.
  void spare(int64_t slot) { watches_[slot].due = kNowhere; }
  // Slots that a rule ends with the tokens they have, or whose coin is to be asked; valid until the next call.
  const std::vector<int64_t>& look();
  // Everything read that there is.
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
