// Python binding of native/suffix_store.h. Checks shapes against each other; drafter/suffix is its only caller.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "suffix_store.h"

namespace nb = nanobind;
using namespace nb::literals;
using paceline::suffix::DraftRows;
using paceline::suffix::DraftShape;
using paceline::suffix::Store;
using paceline::suffix::StoreOptions;

namespace {

template <typename T, int rank>
using In = nb::ndarray<const T, nb::ndim<rank>, nb::c_contig, nb::device::cpu>;
template <typename T, int rank>
using Out = nb::ndarray<T, nb::ndim<rank>, nb::c_contig, nb::device::cpu>;
using Tokens = In<int32_t, 1>;
using Numbers = In<int64_t, 1>;

void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

int64_t size(const Numbers& array) { return static_cast<int64_t>(array.size()); }

// A request's own occurrence counts as four of the window (measured: benchmarks/suffix_index.py).
constexpr float kOwnWeight = 4;

class Suffixes {
 public:
  Suffixes(int64_t handles, int64_t window_bytes, int64_t pool_bytes, int64_t max_bytes, float epoch_decay,
           int64_t inline_tokens, bool siblings)
      : handles_(handles),
        store_(StoreOptions{handles, bytes(window_bytes), bytes(pool_bytes), bytes(max_bytes), epoch_decay, kOwnWeight,
                            inline_tokens, siblings}) {}

  void begin(int64_t handle, Tokens prompt) { store_.begin(handle, prompt.data(), prompt.size()); }
  void finish(int64_t handle, bool keep, int64_t version) { store_.finish(handle, keep, version); }
  void settle(int64_t handle, Tokens text) { store_.settle(handle, text.data(), text.size()); }
  void hear(int64_t handle, int64_t request, int64_t first, Tokens response) {
    store_.hear(handle, request, first, response.data(), response.size());
  }
  void publish(Tokens prompt, Tokens response, int64_t version) {
    store_.publish(prompt.data(), prompt.size(), response.data(), response.size(), version);
  }

  void append_batch(Numbers handles, Tokens tokens, Numbers offsets) {
    check(size(offsets) == size(handles) + 1 && offsets.data()[0] >= 0 &&
              offsets.data()[size(handles)] <= static_cast<int64_t>(tokens.size()),
          "append_batch: offsets must have one entry more than handles and end within tokens");
    nb::gil_scoped_release release;
    store_.append(size(handles), handles.data(), tokens.data(), offsets.data());
  }

  void draft_batch(Numbers handles, Numbers budgets, int64_t depth, int64_t top_k, float min_probability,
                   float match_factor, Out<int64_t, 2> tokens, Out<int64_t, 2> parents, Out<float, 2> probs,
                   Out<int64_t, 1> counts) {
    DraftShape shape = shaped(depth, top_k, tokens.shape(1), min_probability, match_factor);
    DraftRows rows = rows_of(handles, budgets, shape, tokens, parents, counts);
    check(probs.shape(0) == tokens.shape(0) && probs.shape(1) == tokens.shape(1), "draft_batch: arrays differ in size");
    rows.probs = probs.data();
    nb::gil_scoped_release release;
    store_.draft(rows);
  }

  void propose(In<int32_t, 2> history, Numbers slots, Numbers lengths, Numbers room, int64_t depth, int64_t top_k,
               float min_probability, float match_factor, Out<int64_t, 2> tokens, Out<int64_t, 2> parents,
               Out<int64_t, 1> counts) {
    DraftShape shape = shaped(depth, top_k, tokens.shape(1), min_probability, match_factor);
    DraftRows rows = rows_of(slots, room, shape, tokens, parents, counts);
    check(size(lengths) == rows.requests && static_cast<int64_t>(history.shape(0)) >= handles_,
          "propose: arrays differ in size");
    for (int64_t r = 0; r < rows.requests; ++r)
      check(lengths.data()[r] <= static_cast<int64_t>(history.shape(1)), "propose: length beyond the history");
    nb::gil_scoped_release release;
    store_.catch_up(rows.requests, slots.data(), history.data(), history.shape(1), lengths.data());
    store_.draft(rows);
  }

  Store& store() { return store_; }

 private:
  static size_t bytes(int64_t count) {
    check(count >= 0, "Suffixes: bytes >= 0");
    return static_cast<size_t>(count);
  }

  static DraftShape shaped(int64_t depth, int64_t top_k, size_t nodes, float min_probability, float match_factor) {
    check(depth >= 0 && top_k >= 1 && match_factor > 0, "draft: depth >= 0, top_k >= 1 and match_factor > 0");
    return {static_cast<int>(std::min<int64_t>(depth, 1 << 20)), static_cast<int>(std::min<int64_t>(top_k, 1 << 20)),
            static_cast<int>(nodes), min_probability, match_factor};
  }

  static DraftRows rows_of(const Numbers& handles, const Numbers& budgets, const DraftShape& shape,
                        const Out<int64_t, 2>& tokens, const Out<int64_t, 2>& parents,
                        const Out<int64_t, 1>& counts) {
    size_t requests = handles.size(), nodes = static_cast<size_t>(shape.nodes);
    check(budgets.size() == requests && counts.size() == requests && tokens.shape(0) == requests &&
              parents.shape(0) == requests && parents.shape(1) == nodes,
          "draft: arrays differ in size");
    return {size(handles), handles.data(), budgets.data(), shape, tokens.data(), parents.data(), nullptr, counts.data()};
  }

  int64_t handles_;
  Store store_;
};

template <auto function>
auto unlocked() {
  return [](Suffixes& self) {
    nb::gil_scoped_release release;
    return (self.store().*function)();
  };
}

}  // namespace

void bind_suffix(nb::module_& m) {
  nb::class_<Suffixes>(m, "Suffixes", "Suffix index per problem (DAS 4.1). Use drafter.suffix.SuffixDrafter.")
      .def(nb::init<int64_t, int64_t, int64_t, int64_t, float, int64_t, bool>(), "handles"_a, "window_bytes"_a, "pool_bytes"_a,
           "max_bytes"_a, "epoch_decay"_a, "inline_tokens"_a, "siblings"_a)
      .def("begin", &Suffixes::begin)
      .def("finish", &Suffixes::finish)
      .def("settle", &Suffixes::settle)
      .def("hear", &Suffixes::hear)
      .def("publish", &Suffixes::publish)
      .def("append_batch", &Suffixes::append_batch)
      .def("draft_batch", &Suffixes::draft_batch)
      .def("propose", &Suffixes::propose)
      .def("set_version", [](Suffixes& self, int64_t version) { self.store().set_version(version); })
      .def("flush", unlocked<&Store::flush>())
      .def("save", [](Suffixes& self, const std::string& path) {
        nb::gil_scoped_release release;
        self.store().save(path);
      })
      .def("load", [](Suffixes& self, const std::string& path) {
        nb::gil_scoped_release release;
        self.store().load(path);
      })
      .def_prop_ro("gain", [](Suffixes& self) {
        paceline::suffix::Gain gain = self.store().gain();
        return std::vector<int64_t>{gain.drafts, gain.with, gain.without};
      })
      .def_prop_ro("accepted", unlocked<&Store::accepted>())
      .def_prop_ro("bytes", unlocked<&Store::bytes>())
      .def_prop_ro("live_bytes", unlocked<&Store::live_bytes>())
      .def_prop_ro("problems", unlocked<&Store::problems>())
      .def_prop_ro("window_tokens", unlocked<&Store::window_tokens>())
      .def_prop_ro("pool_tokens", unlocked<&Store::pool_tokens>());
}
