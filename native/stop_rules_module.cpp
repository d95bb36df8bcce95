// Python binding of native/stop_rules.h. Checks dtypes and sizes; actors/engine/batch/markers.py is its only caller.
#include <nanobind/nanobind.h>

#include <memory>

#include "buffers.h"
#include "stop_rules.h"

namespace nb = nanobind;
using namespace nb::literals;
using paceline::Array;
using paceline::check;

namespace {

// The arrays of a marker, held while it is referenced.
class Marker {
 public:
  Marker(nb::handle rows, nb::handle moves) : rows_(rows, "rows", 1), moves_(moves, "moves", 2) {
    check(rows_.there() && moves_.there(), "rows and moves are arrays");
    table_ = {rows_.data(), moves_.data(), rows_.size(0), moves_.size(0), moves_.size(1)};
    check(table_.kinds >= 1 && table_.states >= 1 && moves_.stride() == table_.states, "moves is [kinds, states]");
    for (int64_t i = 0; i < table_.vocab; ++i)
      check(table_.rows[i] >= 0 && table_.rows[i] < table_.kinds, "a row is outside of moves");
    for (int64_t i = 0; i < table_.kinds * table_.states; ++i)
      check(table_.moves[i] < table_.states, "a move leads to no state");
  }
  const paceline::MarkerTable* table() const { return &table_; }

 private:
  Array<int32_t> rows_;
  Array<uint16_t> moves_;
  paceline::MarkerTable table_{};
};

class StopReader {
 public:
  explicit StopReader(nb::handle table)
      : tokens_(table.attr("tokens"), "tokens", 2), length_(table.attr("length"), "length", 1),
        prompt_(table.attr("prompt_length"), "prompt_length", 1),
        reader_({tokens_.data(), length_.data(), prompt_.data(), tokens_.size(0), tokens_.size(1)}) {
    check(tokens_.stride() == tokens_.size(1), "tokens is [slots, width]");
    check(length_.size(0) == tokens_.size(0) && prompt_.size(0) == tokens_.size(0), "lengths are [slots]");
  }

  // The caller keeps the markers until the slot has ended.
  void begin(int64_t slot, const Marker* strings, const Marker* answer, int64_t poll_from, int64_t grace, int64_t due) {
    check(poll_from >= 0 && grace >= 0 && due >= 0, "tokens are not negative");
    paceline::Watch watch;
    if (strings != nullptr) watch.strings.marker = strings->table();
    if (answer != nullptr) watch.answer.marker = answer->table();
    watch.poll_from = poll_from;
    watch.grace = grace;
    watch.due = due;
    reader_.begin(checked(slot), watch);
  }
  void end(int64_t slot) { reader_.end(checked(slot)); }
  void spare(int64_t slot) { reader_.spare(running(slot)); }
  nb::object look() {
    const auto& ending = reader_.look();
    if (ending.empty()) return nb::none();
    nb::list slots;
    for (int64_t slot : ending) slots.append(slot);
    return slots;
  }
  nb::tuple found(int64_t slot) {
    const paceline::Watch& watch = reader_.known(running(slot));
    return nb::make_tuple(watch.strings.found, watch.answer.found);
  }

 private:
  int64_t checked(int64_t slot) const {
    check(slot >= 0 && slot < reader_.slots(), "slot out of range");
    return slot;
  }
  int64_t running(int64_t slot) const {
    check(reader_.has(checked(slot)), "no request has begun in this slot");
    return slot;
  }

  Array<int32_t> tokens_;
  Array<int64_t> length_, prompt_;
  paceline::StopReader reader_;
};

}  // namespace

void bind_stop_rules(nb::module_& m) {
  nb::class_<Marker>(m, "StopMarker").def(nb::init<nb::handle, nb::handle>(), "rows"_a, "moves"_a);
  nb::class_<StopReader>(m, "StopReader", "Reads markers along. Use actors.engine.batch.markers.")
      .def(nb::init<nb::handle>(), "table"_a)
      .def("begin", &StopReader::begin, "slot"_a, nb::arg("strings").none(), nb::arg("answer").none(), "poll_from"_a,
           "grace"_a, "due"_a)
      .def("end", &StopReader::end, "slot"_a)
      .def("spare", &StopReader::spare, "slot"_a)
      .def("look", &StopReader::look)
      .def("found", &StopReader::found, "slot"_a);
}
