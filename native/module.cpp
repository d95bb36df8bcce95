// Python binding. Takes addresses and sizes; models/ops checks dtypes, shapes and devices before it calls.
//
// Compiled for the plain architecture, so that importing the module and calling cpu_supported() is safe on every CPU.
#include "binding.h"
#include "cpu.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;
using paceline::Address;
using paceline::at;
using paceline::by_dtype;
using paceline::AttentionShape;
using paceline::bf16;
using paceline::PageTable;

namespace {

bool cpu_supported() {
#if defined(PACELINE_X86_64_V3)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

template <void (*function)(const float*, float*, int64_t)>
void map(Address x, Address out, int64_t n) {
  function(at<const float>(x), at<float>(out), n);
}

}  // namespace

void bind_draft_chain(nb::module_& m);
void bind_eagle(nb::module_& m);
void bind_low_bit(nb::module_& m);
void bind_ngram(nb::module_& m);
void bind_steps(nb::module_& m);
void bind_stop_rules(nb::module_& m);
void bind_suffix(nb::module_& m);

NB_MODULE(paceline_native, m) {
  m.doc() = "Batch-invariant CPU kernels of Paceline. Call them through models.ops, which checks what they are given.";
  m.def("cpu_supported", &cpu_supported, "Whether this CPU has the instructions that the kernels were built for.");
  m.def("cpu_level", [] { return paceline::name_of(paceline::cpu_level()); },
        "The variants in use, avx2, avx512 or amx; PACELINE_CPU limits them. ValueError where it names none.");
  m.def("rms_norm", [](bool half, Address x, Address weight, Address out, int64_t rows, int64_t width, float eps,
                       int threads) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::rms_norm(at<const T>(x), at<const T>(weight), at<T>(out), rows, width, eps, threads);
    });
  });
  m.def("add_rms_norm", [](bool half, Address x, Address residual, Address weight, Address out, Address total,
                           int64_t rows, int64_t width, float eps) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::add_rms_norm(at<const T>(x), at<const T>(residual), at<const T>(weight), at<T>(out), at<T>(total),
                             rows, width, eps);
    });
  });
  m.def("rms_norm_backward", [](bool half, Address grad, Address x, Address weight, Address grad_x,
                                Address grad_weight, int64_t rows, int64_t width, float eps, int threads) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::rms_norm_backward(at<const T>(grad), at<const T>(x), at<const T>(weight), at<T>(grad_x),
                                  at<float>(grad_weight), rows, width, eps, threads);
    });
  });
  m.def("swiglu", [](bool half, Address gate_up, Address out, int64_t rows, int64_t width, int threads) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::swiglu(at<const T>(gate_up), at<T>(out), rows, width, threads);
    });
  });
  m.def("swiglu_backward", [](bool half, Address grad, Address gate_up, Address grad_gate_up, int64_t rows,
                              int64_t width, int threads) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::swiglu_backward(at<const T>(grad), at<const T>(gate_up), at<T>(grad_gate_up), rows, width, threads);
    });
  });
  m.def("rope", [](bool half, Address x, int64_t x_stride, Address cos, Address sin, Address out, int64_t rows,
                   int64_t heads, int64_t head_dim, bool inverse, int threads) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::rope(at<const T>(x), x_stride, at<const float>(cos), at<const float>(sin), at<T>(out), rows, heads,
                     head_dim, inverse, threads);
    });
  });
  m.def("split_qkv", [](bool half, Address qkv, int64_t stride, Address cos, Address sin, Address q_norm,
                        Address k_norm, float eps, Address q, Address k, int64_t rows, int64_t query_heads,
                        int64_t kv_heads, int64_t head_dim) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::split_qkv(at<const T>(qkv), stride, at<const float>(cos), at<const float>(sin), at<const T>(q_norm),
                          at<const T>(k_norm), eps, at<T>(q), at<T>(k), rows, query_heads, kv_heads, head_dim);
    });
  });
  m.def("write_kv", [](bool half, Address k, int64_t k_stride, Address v, int64_t v_stride, Address k_cache,
                       Address v_cache, Address slots, int64_t rows, int64_t width, int64_t cache_slots) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::write_kv(at<const T>(k), k_stride, at<const T>(v), v_stride, at<T>(k_cache), at<T>(v_cache),
                         at<const int64_t>(slots), rows, width, cache_slots);
    });
  });
  m.def("packed_attention", [](bool half, Address q, Address k, Address v, Address offsets, Address parents,
                               int64_t segments, Address out, int64_t rows, int64_t query_heads, int64_t kv_heads, int64_t head_dim, int64_t q_stride,
                               int64_t k_stride, int64_t v_stride, float scale, int threads) {
    AttentionShape shape{rows, query_heads, kv_heads, head_dim, q_stride, k_stride, v_stride, scale, threads};
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::packed_attention(at<const T>(q), at<const T>(k), at<const T>(v),
                                 {at<const int32_t>(offsets), at<const int32_t>(parents), segments}, at<T>(out), shape);
    });
  });
  m.def("packed_attention_backward",
        [](bool half, Address grad, Address q, Address k, Address v, Address offsets, Address parents,
           int64_t segments, Address grad_q, Address grad_k, Address grad_v, int64_t rows, int64_t query_heads, int64_t kv_heads, int64_t head_dim, int64_t q_stride,
           int64_t k_stride, int64_t v_stride, float scale, int threads) {
          AttentionShape shape{rows, query_heads, kv_heads, head_dim, q_stride, k_stride, v_stride, scale, threads};
          by_dtype(half, [&](auto* tag) {
            using T = STORAGE(tag);
            paceline::packed_attention_backward(at<const T>(grad), at<const T>(q), at<const T>(k), at<const T>(v),
                                                {at<const int32_t>(offsets), at<const int32_t>(parents), segments},
                                                at<T>(grad_q), at<T>(grad_k), at<T>(grad_v), shape);
          });
        });
  m.def("paged_attention",
        [](bool half, Address q, Address k_cache, Address v_cache, Address block_tables, int64_t table_width,
           Address query_offsets, Address context_lens, int64_t requests, int64_t block_tokens, int64_t cache_slots,
           Address tree_mask, int64_t tree_width, Address out, int64_t rows, int64_t query_heads, int64_t kv_heads, int64_t head_dim,
           int64_t q_stride, float scale, int threads) {
          int64_t stride = kv_heads * head_dim;
          AttentionShape shape{rows, query_heads, kv_heads, head_dim, q_stride, stride, stride, scale, threads};
          PageTable pages{at<const int32_t>(block_tables), at<const int32_t>(context_lens), requests, table_width,
                          block_tokens, cache_slots};
          by_dtype(half, [&](auto* tag) {
            using T = STORAGE(tag);
            paceline::paged_attention(at<const T>(q), at<const T>(k_cache), at<const T>(v_cache), pages,
                                      at<const int32_t>(query_offsets), at<const uint8_t>(tree_mask), tree_width,
                                      at<T>(out), shape);
          });
        });
  m.def("sample", [](bool half, Address logits, int64_t stride, Address cutoff, Address temperature, Address keys,
                     Address positions, int64_t rows, int64_t vocab, int threads, Address tokens, Address logprobs,
                     Address logprobs_t1) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::sample(at<const T>(logits), stride, at<const float>(cutoff), at<const float>(temperature),
                       at<const int64_t>(keys), at<const int64_t>(positions), rows, vocab, threads,
                       at<int64_t>(tokens), at<float>(logprobs), at<float>(logprobs_t1));
    });
  });
  m.def("sample_topk", [](bool half, Address logits, int64_t stride, Address cutoff, Address temperature, Address keys,
                          Address positions, int64_t rows, int64_t vocab, int64_t k, float scale, bool noise,
                          int threads, Address tokens, Address logprobs) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::sample_topk(at<const T>(logits), stride, at<const float>(cutoff), at<const float>(temperature),
                            at<const int64_t>(keys), at<const int64_t>(positions), rows, vocab, k, scale, noise,
                            threads, at<int64_t>(tokens), at<float>(logprobs));
    });
  });
  m.def("log_softmax", [](Address x, Address out, int64_t rows, int64_t vocab, int threads) {
    paceline::log_softmax(at<const float>(x), at<float>(out), rows, vocab, threads);
  });
  m.def("softmax_terms", [](Address x, Address targets, float temperature, int64_t rows, int64_t vocab, int threads,
                            Address top, Address log_total, Address log_total_t1, Address total, Address entropy) {
    paceline::softmax_terms(at<float>(x), at<const int64_t>(targets), temperature, rows, vocab, threads,
                            {at<float>(top), at<float>(log_total), at<float>(log_total_t1), at<float>(total),
                             at<float>(entropy)});
  });
  m.def("random_words", [](Address keys, Address positions, int64_t rows, int64_t vocab, Address out) {
    paceline::random_words(at<const int64_t>(keys), at<const int64_t>(positions), rows, vocab, at<int64_t>(out));
  });
  m.def("packed_size", &paceline::packed_size);
  m.def("pack_weight", [](bool half, Address weight, Address out, int64_t columns, int64_t depth) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::pack_weight(at<const T>(weight), columns, depth, at<T>(out));
    });
  });
  m.def("linear", [](bool half, Address x, int64_t stride, Address weight, bool packed, Address bias, Address out,
                     int64_t rows, int64_t columns, int64_t depth, int threads) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::linear(at<const T>(x), stride, at<const T>(weight), packed, at<const T>(bias), at<T>(out), rows,
                       columns, depth, threads);
    });
  });
  m.def("merge_rows", [](bool half, Address weight, Address updates, int64_t count, Address out, int64_t rows,
                         int64_t depth, int threads) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::Adapted<T> adapted{at<const T>(weight), at<const paceline::LowRank>(updates), count};
      paceline::merge_rows(adapted, at<T>(out), rows, depth, threads);
    });
  });
  m.def("adapted_linear", [](bool half, Address x, int64_t stride, Address weight, Address updates, int64_t count,
                             Address bias, Address out, int64_t rows, int64_t columns, int64_t depth, int threads) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::Adapted<T> adapted{at<const T>(weight), at<const paceline::LowRank>(updates), count};
      paceline::adapted_linear(at<const T>(x), stride, adapted, at<const T>(bias), at<T>(out), rows, columns, depth,
                               threads);
    });
  });
  nb::class_<paceline::StackShape>(m, "StackShape")
      .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, int64_t,
                    int64_t, int64_t, int64_t>(),
           "layers"_a, "hidden"_a, "query_heads"_a, "kv_heads"_a, "head_dim"_a, "intermediate"_a, "vocab"_a,
           "positions"_a, "eps"_a, "scale"_a, "bits"_a = 0, "hidden_groups"_a = 1,
           "query_groups"_a = 1, "inner_groups"_a = 1)
      .def("workspace_bytes", [](const paceline::StackShape& shape, bool half, int64_t rows) {
        return half ? shape.workspace_bytes<bf16>(rows) : shape.workspace_bytes<float>(rows);
      });
  m.def("decoder_stack",
        [](bool half, const paceline::StackShape& shape, Address layers, Address embedding, Address final_norm,
           Address cos, Address sin, Address tokens, Address positions, Address kv_slots, int64_t rows,
           Address k_cache, Address v_cache, int64_t cache_slots, Address block_tables, int64_t table_width,
           Address query_offsets, Address context_lens, int64_t requests, int64_t block_tokens, Address tree_mask,
           int64_t tree_width, Address workspace, Address out, int threads) {
          PageTable pages{at<const int32_t>(block_tables), at<const int32_t>(context_lens), requests, table_width,
                          block_tokens, cache_slots};
          by_dtype(half, [&](auto* tag) {
            using T = STORAGE(tag);
            paceline::StackWeights<T> weights{at<const paceline::StackLayer<T>>(layers), at<const T>(embedding),
                                              at<const T>(final_norm), at<const float>(cos), at<const float>(sin)};
            paceline::StackStep<T> step{rows, at<const int64_t>(tokens), at<const int64_t>(positions),
                                        at<const int64_t>(kv_slots), at<T>(k_cache), at<T>(v_cache), pages,
                                        at<const int32_t>(query_offsets), at<const uint8_t>(tree_mask), tree_width};
            paceline::decoder_stack(shape, weights, step, at<void>(workspace), at<T>(out), threads);
          });
        });
  m.def("exp_array", &map<paceline::exp_array>);
  m.def("log_array", &map<paceline::log_array>);
  m.def("log1m_array", &map<paceline::log1m_array>);
  bind_draft_chain(m);
  bind_eagle(m);
  bind_low_bit(m);
  bind_ngram(m);
  bind_steps(m);
  bind_stop_rules(m);
  bind_suffix(m);
}
