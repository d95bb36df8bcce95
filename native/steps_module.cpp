// Python binding of native/steps.h. Checks dtypes and sizes; actors/engine/batch/step/kernels.py is its only caller.
#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "buffers.h"
#include "steps.h"

namespace nb = nanobind;
using namespace nb::literals;
using paceline::Array;
using paceline::check;

namespace {

// Holds the buffers of the table and of the step's arrays during its lifetime.
class StepKernels {
 public:
  StepKernels(nb::handle table, int64_t block_tokens) {
    table_.tokens = matrix<int32_t>(table, "tokens", table_.width);
    int64_t width = 0;
    table_.logprobs = matrix<float>(table, "logprobs", width);
    table_.logprobs_t1 = matrix<float>(table, "logprobs_t1", width);
    check(width == table_.width, "logprobs and tokens are of one shape");
    table_.block_tables = matrix<int32_t>(table, "block_tables", table_.table_width);
    table_.length = vector<int64_t>(table, "length");
    table_.computed = vector<int64_t>(table, "computed");
    table_.spared_steps = vector<int64_t>(table, "spared_steps");
    table_.drafted = vector<int64_t>(table, "drafted");
    table_.accepted = vector<int64_t>(table, "accepted");
    table_.limit = vector<int64_t>(table, "limit");
    table_.noise_origin = vector<int64_t>(table, "noise_origin");
    table_.reported = vector<int64_t>(table, "reported");
    table_.block_counts = vector<int64_t>(table, "block_counts");
    table_.noise_key = vector<int64_t>(table, "noise_key");
    table_.top_k = vector<int64_t>(table, "top_k");
    table_.temperature = vector<float>(table, "temperature");
    table_.top_p = vector<float>(table, "top_p");
    check(block_tokens >= 1, "block_tokens is at least 1");
    table_.block_tokens = block_tokens;
  }

  nb::tuple clean(nb::handle slots, nb::handle tokens, nb::handle counts, nb::handle parents, int64_t width,
                  int64_t depth, int64_t vocab, nb::handle out_tokens, nb::handle out_counts, nb::handle out_parents,
                  nb::handle out_depths) const {
    Array<int64_t> s(slots, "slots", 1), t(tokens, "tokens", 2), c(counts, "counts", 1), p(parents, "parents", 2);
    Array<int64_t> ot(out_tokens, "out tokens", 2, true), oc(out_counts, "out counts", 1, true);
    Array<int64_t> op(out_parents, "out parents", 2, true), od(out_depths, "out depths", 2, true);
    int64_t requests = s.size(0);
    check(t.size(0) == requests && c.size(0) == requests && t.size(1) >= width, "drafts of other requests");
    check(ot.size(0) == requests && ot.size(1) == width && oc.size(0) == requests, "outputs of another shape");
    if (p.there()) {
      check(p.size(0) == requests && p.size(1) >= width, "parents of other requests");
      check(op.there() && op.size(0) == requests && op.size(1) == width, "outputs of another shape");
      check(od.there() && od.size(0) == requests && od.size(1) == width, "outputs of another shape");
    }
    paceline::RawDrafts drafts{t.data(), c.data(), p.data(), width, t.stride(), p.there() ? p.stride() : 0};
    paceline::Cleaned cleaned =
        paceline::clean_drafts(table_, checked(s), requests, drafts, depth, vocab, ot.data(), oc.data(), op.data(), od.data());
    return nb::make_tuple(cleaned.drafted, cleaned.short_of_blocks);
  }

  nb::tuple rows(nb::handle slots, nb::handle rows, nb::handle samples, nb::handle counts, nb::handle tokens,
                 nb::handle parents, nb::handle depths, nb::handle out) const {
    PlanArrays plan(*this, slots, rows, samples);
    DraftArrays drafts(plan.plan, counts, tokens, parents, depths);
    Array<int64_t> row_tokens(out["tokens"], "tokens", 1, true), positions(out["positions"], "positions", 1, true);
    Array<int64_t> kv_slots(out["kv_slots"], "kv_slots", 1, true), sample_rows(out["sample_rows"], "sample_rows", 1, true);
    Array<int64_t> keys(out["noise_keys"], "noise_keys", 1, true), top_k(out["top_k"], "top_k", 1, true);
    Array<int64_t> noise_positions(out["noise_positions"], "noise_positions", 1, true);
    Array<float> temperature(out["temperature"], "temperature", 1, true), top_p(out["top_p"], "top_p", 1, true);
    Array<int32_t> offsets(out["query_offsets"], "query_offsets", 1, true);
    Array<int32_t> contexts(out["context_lens"], "context_lens", 1, true);
    Array<int32_t> blocks(out["block_tables"], "block_tables", 1, true);
    Array<uint8_t> mask(out["tree_mask"], "tree_mask", 1, true);
    int64_t capacity = row_tokens.size(0);
    for (const auto* other : {&positions, &kv_slots, &sample_rows, &keys, &top_k, &noise_positions})
      check(other->size(0) >= capacity, "the step's arrays are of one length");
    check(temperature.size(0) >= capacity && top_p.size(0) >= capacity, "the step's arrays are of one length");
    check(contexts.size(0) >= plan.plan.requests && offsets.size(0) > plan.plan.requests &&
              blocks.size(0) >= plan.plan.requests * table_.table_width,
          "the step's arrays hold every slot");
    paceline::RowArrays arrays{row_tokens.data(), positions.data(), kv_slots.data(),    sample_rows.data(),
                               keys.data(),       noise_positions.data(), top_k.data(), temperature.data(),
                               top_p.data(),      offsets.data(),   contexts.data(),    blocks.data(),
                               mask.data(),       capacity,         mask.size(0)};
    paceline::Rows made = paceline::plan_rows(table_, plan.plan, drafts.pointer(), arrays);
    return nb::make_tuple(made.total, made.most, made.max_context, made.sampled, made.truncated);
  }

  nb::tuple settle(nb::handle slots, nb::handle rows, nb::handle samples, nb::handle draws, nb::handle logprobs,
                   nb::handle logprobs_t1, nb::handle counts, nb::handle tokens, nb::handle parents, nb::handle depths,
                   nb::handle stop, int64_t progress_every, nb::handle emitted, nb::handle accepted, nb::handle flags,
                   nb::handle path, nb::handle moves) const {
    PlanArrays plan(*this, slots, rows, samples);
    DraftArrays drafts(plan.plan, counts, tokens, parents, depths);
    Array<int64_t> d(draws, "draws", 1), st(stop, "stop", 2), e(emitted, "emitted", 1, true);
    Array<float> lp(logprobs, "logprobs", 1), t1(logprobs_t1, "logprobs_t1", 1);
    Array<int64_t> a(accepted, "accepted", 1, true), w(path, "path", 2, true), m(moves, "moves", 2, true);
    Array<uint8_t> f(flags, "flags", 1, true);
    check(lp.size(0) == d.size(0) && t1.size(0) == d.size(0), "draws and log-probs are of one length");
    check(st.size(0) == table_.slots && st.stride() == st.size(1), "stop is [slots, n]");
    int64_t sampling = plan.sampling();
    check(e.size(0) >= sampling && a.size(0) >= sampling && f.size(0) >= sampling, "outputs of another shape");
    if (drafts.tree())
      check(w.there() && w.size(0) == sampling && w.size(1) == drafts.width() + 1 && m.there() && m.size(0) == 2 &&
                m.size(1) >= sampling * drafts.width(),
            "outputs of another shape");
    paceline::Settled settled = paceline::settle(
        table_, plan.plan, {d.data(), lp.data(), t1.data(), d.size(0)}, drafts.pointer(), st.data(), st.size(1),
        progress_every, e.data(), a.data(), f.data(), w.data(), m.data(), m.there() ? m.data() + m.stride() : nullptr);
    return nb::make_tuple(settled.emitted, settled.accepted, settled.moves, settled.flagged);
  }

 private:
  struct PlanArrays {
    Array<int64_t> slots, rows;
    Array<bool> samples;
    paceline::Plan plan;

    PlanArrays(const StepKernels& kernels, nb::handle s, nb::handle r, nb::handle d)
        : slots(s, "slots", 1), rows(r, "rows", 1), samples(d, "samples", 1) {
      check(rows.size(0) == slots.size(0) && samples.size(0) == slots.size(0), "slots, rows and samples differ");
      plan = {kernels.checked(slots), rows.data(), samples.data(), slots.size(0)};
    }
    int64_t sampling() const {
      int64_t count = 0;
      for (int64_t r = 0; r < plan.requests; ++r) count += plan.samples[r];
      return count;
    }
  };

  class DraftArrays {
   public:
    DraftArrays(const paceline::Plan& plan, nb::handle counts, nb::handle tokens, nb::handle parents, nb::handle depths)
        : counts_(counts, "counts", 1), tokens_(tokens, "tokens", 2), parents_(parents, "parents", 2),
          depths_(depths, "depths", 2) {
      if (!counts_.there()) return;
      drafts_ = {counts_.data(), tokens_.data(), parents_.data(), depths_.data(), tokens_.size(1)};
      check(counts_.size(0) == plan.requests && tokens_.stride() == drafts_.width, "drafts of other requests");
      int64_t sampling = 0;
      for (int64_t r = 0; r < plan.requests; ++r) {
        check(counts_.data()[r] >= 0 && counts_.data()[r] <= (plan.samples[r] ? drafts_.width : 0), "counts out of range");
        sampling += plan.samples[r];
      }
      check(tokens_.size(0) == sampling, "drafts of other requests");
      if (!tree()) return;
      for (const auto* array : {&parents_, &depths_})
        check(array->there() && array->size(0) == sampling && array->size(1) == drafts_.width &&
                  array->stride() == drafts_.width,
              "parents and depths are of one shape with tokens");
      check(sampling == plan.requests, "trees only where every request decodes");
    }
    bool tree() const { return parents_.there(); }
    int64_t width() const { return drafts_.width; }
    const paceline::StepDrafts* pointer() const { return counts_.there() ? &drafts_ : nullptr; }

   private:
    Array<int64_t> counts_, tokens_, parents_, depths_;
    paceline::StepDrafts drafts_{};
  };

  const int64_t* checked(const Array<int64_t>& slots) const {
    for (int64_t r = 0; r < slots.size(0); ++r)
      check(slots.data()[r] >= 0 && slots.data()[r] < table_.slots, "slot out of range");
    return slots.data();
  }

  template <typename T>
  T* vector(nb::handle table, const char* name) {
    auto array = std::make_unique<Array<T>>(table.attr(name), name, 1, true);
    if (table_.slots == 0) table_.slots = array->size(0);
    check(array->size(0) == table_.slots, name);
    return keep(std::move(array));
  }

  template <typename T>
  T* matrix(nb::handle table, const char* name, int64_t& width) {
    auto array = std::make_unique<Array<T>>(table.attr(name), name, 2, true);
    width = array->size(1);
    if (table_.slots == 0) table_.slots = array->size(0);
    check(array->size(0) == table_.slots && array->stride() == width, name);
    return keep(std::move(array));
  }

  template <typename T>
  T* keep(std::unique_ptr<Array<T>> array) {
    T* data = array->data();
    held_.emplace_back(std::shared_ptr<Array<T>>(std::move(array)));
    return data;
  }

  paceline::SlotArrays table_{};
  std::vector<std::shared_ptr<void>> held_;
};

}  // namespace

void bind_steps(nb::module_& m) {
  nb::class_<StepKernels>(m, "StepKernels", "Array work of engine steps. Use actors.engine.batch.step.kernels.")
      .def(nb::init<nb::handle, int64_t>(), "table"_a, "block_tokens"_a)
      .def("clean", &StepKernels::clean, nb::arg("slots"), nb::arg("tokens"), nb::arg("counts"),
           nb::arg("parents").none(), nb::arg("width"), nb::arg("depth"), nb::arg("vocab"), nb::arg("out_tokens"),
           nb::arg("out_counts"), nb::arg("out_parents").none(), nb::arg("out_depths").none())
      .def("rows", &StepKernels::rows, nb::arg("slots"), nb::arg("rows"), nb::arg("samples"), nb::arg("counts").none(),
           nb::arg("tokens").none(), nb::arg("parents").none(), nb::arg("depths").none(), nb::arg("out"))
      .def("settle", &StepKernels::settle, nb::arg("slots"), nb::arg("rows"), nb::arg("samples"), nb::arg("draws"),
           nb::arg("logprobs"), nb::arg("logprobs_t1"), nb::arg("counts").none(), nb::arg("tokens").none(),
           nb::arg("parents").none(), nb::arg("depths").none(), nb::arg("stop"), nb::arg("progress_every"),
           nb::arg("emitted"), nb::arg("accepted"), nb::arg("flags"), nb::arg("path").none(), nb::arg("moves").none());
  m.def("move_rows", [](uintptr_t cache, int64_t layers, int64_t slots, int64_t row_bytes, nb::handle moves,
                        int64_t count) {
    Array<int64_t> m(moves, "moves", 2);
    check(m.size(0) == 2 && count <= m.size(1), "moves is [2, N]");
    for (int64_t i = 0; i < count; ++i)
      for (int64_t end : {m.data()[i], m.data()[i + m.stride()]}) check(end >= 0 && end < slots, "slot out of range");
    paceline::move_rows(reinterpret_cast<char*>(cache), layers, slots, row_bytes, m.data(), m.data() + m.stride(), count);
  });
}
