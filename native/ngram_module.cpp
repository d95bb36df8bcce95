// Python binding of native/ngram.h. Checks shapes against each other; drafter/ngram.py is its only caller.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "ngram.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T, int rank>
using In = nb::ndarray<const T, nb::ndim<rank>, nb::c_contig, nb::device::cpu>;
template <typename T, int rank>
using Out = nb::ndarray<T, nb::ndim<rank>, nb::c_contig, nb::device::cpu>;

void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

class Ngrams {
 public:
  Ngrams(int64_t slots, int64_t max_n, int64_t min_n, int64_t max_bytes, int64_t kept_texts, int64_t kept_generations)
      : slots_(slots),
        index_(checked({slots, max_n, min_n, static_cast<size_t>(max_bytes), kept_texts, kept_generations})) {}

  void begin(int64_t slot, In<int32_t, 1> prompt, In<int32_t, 1> response) {
    check(slot >= 0 && slot < slots_, "begin: slot out of range");
    index_.begin(slot, prompt.data(), prompt.size(), response.data(), response.size());
  }

  void end(int64_t slot, In<int32_t, 1> tokens, bool finished) {
    check(slot >= 0 && slot < slots_, "end: slot out of range");
    index_.end(slot, tokens.data(), tokens.size(), finished);
  }

  void remember(In<int32_t, 1> prompt, In<int32_t, 1> response) {
    index_.remember(prompt.data(), prompt.size(), response.data(), response.size());
  }

  void propose(In<int32_t, 2> history, In<int64_t, 1> slots, In<int64_t, 1> lengths, In<int64_t, 1> room, int64_t depth,
               int64_t top_k, Out<int64_t, 2> tokens, Out<int64_t, 2> parents, Out<int64_t, 1> counts) {
    int64_t requests = slots.size(), nodes = tokens.shape(1);
    check(static_cast<int64_t>(lengths.size()) == requests && static_cast<int64_t>(room.size()) == requests &&
              static_cast<int64_t>(counts.size()) == requests && static_cast<int64_t>(tokens.shape(0)) == requests &&
              static_cast<int64_t>(parents.shape(0)) == requests && static_cast<int64_t>(parents.shape(1)) == nodes &&
              static_cast<int64_t>(history.shape(0)) >= slots_,
          "propose: arrays of different sizes");
    for (int64_t r = 0; r < requests; ++r)
      check(lengths.data()[r] <= static_cast<int64_t>(history.shape(1)), "propose: length beyond the history");
    paceline::NgramBatch batch{requests,       slots.data(), history.data(), static_cast<int64_t>(history.shape(1)),
                               lengths.data(), room.data(),  depth,          top_k, nodes};
    bool known;
    {
      nb::gil_scoped_release release;
      known = index_.propose(batch, tokens.data(), parents.data(), counts.data());
    }
    check(known, "propose: a slot without a request, or a history that became shorter");
  }

  void age() { index_.age(); }
  size_t bytes() const { return index_.bytes(); }
  size_t groups() const { return index_.groups(); }

 private:
  static const paceline::NgramLimits& checked(const paceline::NgramLimits& limits) {
    check(limits.slots >= 1 && 1 <= limits.min_n && limits.min_n <= limits.max_n && limits.max_n <= 16 &&
              limits.kept_texts >= 1,
          "n-grams of 1 to 16 tokens, at least one slot and one kept text");
    return limits;
  }

  int64_t slots_;
  paceline::NgramIndex index_;
};

}  // namespace

void bind_ngram(nb::module_& m) {
  nb::class_<Ngrams>(m, "Ngrams", "Retrieval of continuations by n-gram, per prompt. Use drafter.ngram.NgramDrafter.")
      .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>(), "slots"_a, "max_n"_a, "min_n"_a,
           "max_bytes"_a, "kept_texts"_a, "kept_generations"_a)
      .def("begin", &Ngrams::begin)
      .def("end", &Ngrams::end)
      .def("remember", &Ngrams::remember)
      .def("propose", &Ngrams::propose)
      .def("age", &Ngrams::age)
      .def_prop_ro("bytes", &Ngrams::bytes)
      .def_prop_ro("groups", &Ngrams::groups);
}
