// Python binding of the EAGLE drafter's passes; models/ops/eagle.py checks the arguments.
#include "binding.h"
#include "kernels.h"

namespace nb = nanobind;
using paceline::Address;
using paceline::at;
using paceline::bf16;
using paceline::by_dtype;
using paceline::PageTable;
using paceline::StackShape;

namespace {

// Addresses of the weights, in the order of EagleWeights.
struct Weights {
  Address layer, fuse, embedding, head;
  bool head_packed;
  Address cos, sin;

  template <typename T>
  paceline::EagleWeights<T> of() const {
    return {at<const paceline::StackLayer<T>>(layer), at<const T>(fuse), at<const T>(embedding), at<const T>(head),
            head_packed, at<const float>(cos), at<const float>(sin)};
  }
};

}  // namespace

void bind_eagle(nb::module_& m) {
  nb::class_<Weights>(m, "EagleWeights")
      .def("__init__", [](Weights* weights, Address layer, Address fuse, Address embedding, Address head,
                          bool head_packed, Address cos, Address sin) {
        new (weights) Weights{layer, fuse, embedding, head, head_packed, cos, sin};
      });
  m.def("eagle_workspace_bytes", [](bool half, const StackShape& shape, int64_t rows) {
    return half ? paceline::eagle_workspace_bytes<bf16>(shape, rows)
                : paceline::eagle_workspace_bytes<float>(shape, rows);
  });
  m.def("eagle_pass",
        [](bool half, const StackShape& shape, const Weights& weights, Address tokens, Address features,
           Address positions, Address kv_slots, int64_t rows, Address k_cache, Address v_cache, int64_t cache_slots,
           Address block_tables, int64_t table_width, Address query_offsets, Address context_lens, int64_t requests,
           int64_t block_tokens, Address tree_mask, int64_t tree_width, Address workspace, Address out, int threads) {
          PageTable pages{at<const int32_t>(block_tables), at<const int32_t>(context_lens), requests, table_width,
                          block_tokens, cache_slots};
          by_dtype(half, [&](auto* tag) {
            using T = STORAGE(tag);
            paceline::StackStep<T> step{rows, at<const int64_t>(tokens), at<const int64_t>(positions),
                                        at<const int64_t>(kv_slots), at<T>(k_cache), at<T>(v_cache), pages,
                                        at<const int32_t>(query_offsets), at<const uint8_t>(tree_mask), tree_width};
            paceline::eagle_pass(shape, weights.of<T>(), step, at<const T>(features), at<void>(workspace), at<T>(out),
                                 threads);
          });
        });
  m.def("eagle_chain",
        [](bool half, const StackShape& shape, const Weights& weights, Address hidden, Address positions,
           Address committed, int64_t rows, int64_t depth, Address k_cache, Address v_cache, int64_t cache_slots,
           Address block_tables, int64_t table_width, int64_t block_tokens, Address temperature, Address keys,
           Address noise_positions, float scale, bool noise, Address workspace, Address tokens, Address scores,
           int threads) {
          by_dtype(half, [&](auto* tag) {
            using T = STORAGE(tag);
            paceline::EagleChain<T> chain{rows,
                                          depth,
                                          at<T>(hidden),
                                          at<const int64_t>(positions),
                                          at<const int64_t>(committed),
                                          at<const int32_t>(block_tables),
                                          table_width,
                                          block_tokens,
                                          at<T>(k_cache),
                                          at<T>(v_cache),
                                          cache_slots,
                                          at<const float>(temperature),
                                          at<const int64_t>(keys),
                                          at<const int64_t>(noise_positions),
                                          scale,
                                          noise};
            paceline::eagle_chain(shape, weights.of<T>(), chain, at<void>(workspace), at<int64_t>(tokens),
                                  at<float>(scores), threads);
          });
        });
}
