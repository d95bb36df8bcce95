// Python binding of chains of drafts; models/ops/chain.py checks the arguments.
#include "binding.h"
#include "draft_chain.h"

namespace nb = nanobind;
using paceline::Address;
using paceline::at;
using paceline::bf16;
using paceline::by_dtype;
using paceline::StackShape;

void bind_draft_chain(nb::module_& m) {
  m.def("draft_chain_workspace_bytes", [](bool half, const StackShape& shape, int64_t requests) {
    return half ? paceline::draft_chain_workspace_bytes<bf16>(shape, requests)
                : paceline::draft_chain_workspace_bytes<float>(shape, requests);
  });
  m.def("draft_chain",
        [](bool half, const StackShape& shape, Address layers, Address embedding, Address final_norm, Address cos,
           Address sin, Address head, int64_t head_bits, bool head_packed, int64_t requests, int64_t depth,
           Address slots, Address lengths, Address prompt_lengths, Address counts, Address history,
           int64_t history_width, Address block_tables, int64_t table_slots, int64_t table_width, int64_t block_tokens,
           int64_t cache_slots, Address k_cache, Address v_cache, Address temperature, Address top_p, Address top_k,
           Address keys, Address logits, Address workspace, Address tokens, int threads) {
          by_dtype(half, [&](auto* tag) {
            using T = STORAGE(tag);
            const paceline::StackWeights<T> weights{at<const paceline::StackLayer<T>>(layers), at<const T>(embedding),
                                                    at<const T>(final_norm), at<const float>(cos), at<const float>(sin)};
            const paceline::DraftChain<T> chain{requests,
                                                depth,
                                                at<const int64_t>(slots),
                                                at<const int64_t>(lengths),
                                                at<const int64_t>(prompt_lengths),
                                                at<const int64_t>(counts),
                                                at<const int32_t>(history),
                                                history_width,
                                                at<const int32_t>(block_tables),
                                                table_slots,
                                                table_width,
                                                block_tokens,
                                                cache_slots,
                                                at<T>(k_cache),
                                                at<T>(v_cache),
                                                at<const float>(temperature),
                                                at<const float>(top_p),
                                                at<const int64_t>(top_k),
                                                at<const int64_t>(keys),
                                                at<T>(logits)};
            paceline::draft_chain(shape, weights, {at<const void>(head), head_bits, head_packed}, chain,
                                  at<void>(workspace), at<int64_t>(tokens), threads);
          });
        });
}
