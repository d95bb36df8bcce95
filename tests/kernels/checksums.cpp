// One line "kernel dtype checksum" for each native kernel over fixed inputs: the program of test_other_cpus.py, compiled
// for several CPUs. Inputs are multiples of 2^-22 made of Philox words, so that they are the same numbers everywhere.
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"

using namespace paceline;

namespace {

constexpr uint64_t kFnvBasis = 0xCBF29CE484222325, kFnvPrime = 0x100000001B3;

template <typename V>
void print(const char* kernel, const char* dtype, std::initializer_list<const std::vector<V>*> parts) {
  uint64_t sum = kFnvBasis;
  for (const auto* part : parts) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(part->data());
    for (size_t i = 0; i < part->size() * sizeof(V); ++i) sum = (sum ^ bytes[i]) * kFnvPrime;
  }
  std::printf("%s %s %016llx\n", kernel, dtype, static_cast<unsigned long long>(sum));
}

// In [-size, size); another key gives other numbers.
std::vector<float> numbers(int64_t n, int64_t key, float size = 2.0f) {
  std::vector<int64_t> words(n);
  const int64_t position = 0;
  random_words(&key, &position, 1, n, words.data());
  std::vector<float> out(n);
  for (int64_t i = 0; i < n; ++i)
    out[i] = static_cast<float>((words[i] >> 8) - (1 << 23)) * (0x1p-22f * (size / 2.0f));
  return out;
}

template <typename T>
std::vector<T> stored(const std::vector<float>& x) {
  std::vector<T> out(x.size());
  for (size_t i = 0; i < x.size(); i += kLanes) {
    int count = static_cast<int>(x.size() - i < kLanes ? x.size() - i : kLanes);
    store(out.data() + i, load(x.data() + i, count), count);
  }
  return out;
}

template <typename T>
std::vector<T> values(int64_t n, int64_t key, float size = 2.0f) {
  return stored<T>(numbers(n, key, size));
}

template <typename T>
void tokenwise(const char* dtype) {
  const int64_t rows = 9, width = 45;
  auto x = values<T>(rows * 2 * width, 1, 8.0f), grad = values<T>(rows * width, 2), weight = values<T>(width, 3);
  std::vector<T> out(rows * width), total(rows * width), grad_x(rows * width), wide(rows * 2 * width);
  std::vector<float> grad_weight(width);
  rms_norm(x.data(), weight.data(), out.data(), rows, width, 1e-6f, 1);
  print<T>("rms_norm", dtype, {&out});
  add_rms_norm(x.data(), grad.data(), weight.data(), out.data(), total.data(), rows, width, 1e-6f);
  print<T>("add_rms_norm", dtype, {&out, &total});
  rms_norm_backward(grad.data(), x.data(), weight.data(), grad_x.data(), grad_weight.data(), rows, width, 1e-6f, 2);
  print<T>("rms_norm_backward", dtype, {&grad_x});
  print<float>("rms_norm_backward_weight", dtype, {&grad_weight});
  swiglu(x.data(), out.data(), rows, width, 1);
  print<T>("swiglu", dtype, {&out});
  swiglu_backward(grad.data(), x.data(), wide.data(), rows, width, 2);
  print<T>("swiglu_backward", dtype, {&wide});

  const int64_t heads = 5, head_dim = 18, half = head_dim / 2;
  auto qkv = values<T>(rows * heads * head_dim, 4), norm = values<T>(head_dim, 5);
  auto cos = numbers(rows * half, 6, 1.0f), sin = numbers(rows * half, 7, 1.0f);
  std::vector<T> turned(qkv.size()), q(rows * 3 * head_dim), k(rows * head_dim);
  rope(qkv.data(), heads * head_dim, cos.data(), sin.data(), turned.data(), rows, heads, head_dim, true, 1);
  print<T>("rope", dtype, {&turned});
  split_qkv(qkv.data(), heads * head_dim, cos.data(), sin.data(), norm.data(), norm.data(), 1e-6f, q.data(), k.data(),
            rows, 3, 1, head_dim);
  print<T>("split_qkv", dtype, {&q, &k});
}

template <typename T>
void attention(const char* dtype) {
  const int64_t rows = 41, heads = 4, kv_heads = 2, head_dim = 24, block = 8, blocks = 12;
  auto q = values<T>(rows * heads * head_dim, 11), grad = values<T>(q.size(), 12);
  auto k = values<T>(rows * kv_heads * head_dim, 13), v = values<T>(k.size(), 14);
  const std::vector<int32_t> offsets = {0, 3, 40, 41};
  AttentionShape shape{rows, heads, kv_heads, head_dim, heads * head_dim, kv_heads * head_dim, kv_heads * head_dim,
                       0.2041f, 2};
  std::vector<T> out(q.size()), grad_q(q.size()), grad_k(k.size()), grad_v(v.size());
  const std::vector<int32_t> parents = {-1, 0, 0};  // the last two go on from the first
  for (const int32_t* shared : {static_cast<const int32_t*>(nullptr), parents.data()}) {
    const std::string name = shared == nullptr ? "packed_attention" : "shared_attention";
    packed_attention(q.data(), k.data(), v.data(), {offsets.data(), shared, 3}, out.data(), shape);
    print<T>(name.c_str(), dtype, {&out});
    packed_attention_backward(grad.data(), q.data(), k.data(), v.data(), {offsets.data(), shared, 3}, grad_q.data(),
                              grad_k.data(), grad_v.data(), shape);
    print<T>((name + "_backward").c_str(), dtype, {&grad_q, &grad_k, &grad_v});
  }

  auto cache_k = values<T>(blocks * block * kv_heads * head_dim, 15), cache_v = values<T>(cache_k.size(), 16);
  const std::vector<int32_t> tables = {7, 3, 1, 0, 9, 2, 4, 0, 5, 6, 8, 10}, queries = {0, 2, 5, 6}, lens = {17, 29, 31};
  shape.rows = 6;
  PageTable pages{tables.data(), lens.data(), 3, 4, block, blocks * block};
  out.assign(6 * heads * head_dim, T{});
  paged_attention(q.data(), cache_k.data(), cache_v.data(), pages, queries.data(), nullptr, 0, out.data(), shape);
  print<T>("paged_attention", dtype, {&out});
}

template <typename T>
void products(const char* dtype) {
  for (int64_t rows : {1, 7, 40}) {
    const int64_t columns = 100, depth = 128;
    auto x = values<T>(rows * depth, 21), weight = values<T>(columns * depth, 22), bias = values<T>(columns, 23);
    std::vector<T> packed(packed_size(columns, depth)), out(rows * columns), from_panels(rows * columns);
    pack_weight(weight.data(), columns, depth, packed.data());
    linear(x.data(), depth, weight.data(), false, bias.data(), out.data(), rows, columns, depth, 1);
    linear(x.data(), depth, packed.data(), true, bias.data(), from_panels.data(), rows, columns, depth, 2);
    print<T>(("linear_" + std::to_string(rows)).c_str(), dtype, {&out, &from_panels});
    for (int64_t bits : {8, 4}) {
      LowBitWeight low{nullptr, bits, columns, depth, bits == 8 ? 1 : 2};
      std::vector<uint8_t> panels(low.packed_bytes());
      quantise_pack(weight.data(), low, bits, panels.data(), 1);
      print<uint8_t>(("quantise_pack_" + std::to_string(bits)).c_str(), dtype, {&panels});
      low.panels = panels.data();
      low_bit_linear(x.data(), depth, low, bias.data(), out.data(), rows, 1);
      print<T>(("low_bit_linear_" + std::to_string(bits) + "_" + std::to_string(rows)).c_str(), dtype, {&out});
    }
  }
}

template <typename T>
void sampling(const char* dtype) {
  for (int64_t vocab : {229, 4099}) {
    const std::string of = "_" + std::to_string(vocab);
    const int64_t rows = 6, k = 5;
    auto logits = values<T>(rows * vocab, 31, 12.0f);
    const float none = -std::numeric_limits<float>::infinity();
    const std::vector<float> cutoff = {none, -1.0f, none, 2.0f, none, none}, heat = {1.0f, 1.0f, 0.7f, 0.7f, 0.0f, 1.3f};
    const std::vector<int64_t> keys = {1, 2, 1LL << 40, 4, 5, 6}, positions = {0, 7, 70, 700, 7000, 70000};
    std::vector<int64_t> tokens(rows), best(rows * k);
    std::vector<float> logprobs(rows), logprobs_t1(rows), scores(rows * k);
    sample(logits.data(), vocab, cutoff.data(), heat.data(), keys.data(), positions.data(), rows, vocab, 2,
           tokens.data(), logprobs.data(), logprobs_t1.data());
    print<int64_t>(("sample_tokens" + of).c_str(), dtype, {&tokens});
    print<float>(("sample_logprobs" + of).c_str(), dtype, {&logprobs, &logprobs_t1});
    sample_topk(logits.data(), vocab, cutoff.data(), heat.data(), keys.data(), positions.data(), rows, vocab, k, 1.5f,
                true, 1, best.data(), scores.data());
    print<int64_t>(("sample_topk_tokens" + of).c_str(), dtype, {&best});
    print<float>(("sample_topk_logprobs" + of).c_str(), dtype, {&scores});
    if (std::is_same<T, float>::value) {
      auto x = numbers(rows * vocab, 32, 30.0f);
      std::vector<float> table(x.size());
      log_softmax(x.data(), table.data(), rows, vocab, 2);
      print<float>(("log_softmax" + of).c_str(), dtype, {&table});
    }
  }
}

// Three blocks over a paged cache, with head norms and biases.
template <typename T>
void stack(const char* dtype) {
  const int64_t layers = 3, hidden = 48, heads = 3, kv_heads = 1, head_dim = 16, inner = 80, vocab = 61, positions = 64;
  const int64_t qkv = (heads + 2 * kv_heads) * head_dim, block = 8, blocks = 8, rows = 5;
  std::vector<std::vector<T>> kept;
  int64_t key = 100;
  auto vector = [&](int64_t n, float size) { return kept.push_back(values<T>(n, key++, size)), kept.back().data(); };
  auto panels = [&](int64_t columns, int64_t depth) {
    auto weight = values<T>(columns * depth, key++, 0.4f);
    kept.emplace_back(packed_size(columns, depth));
    pack_weight(weight.data(), columns, depth, kept.back().data());
    return static_cast<const void*>(kept.back().data());
  };
  kept.reserve(64);
  std::vector<StackLayer<T>> of;
  for (int64_t i = 0; i < layers; ++i) {
    StackLayer<T> layer{};
    layer.input_norm = vector(hidden, 2.0f), layer.mlp_norm = vector(hidden, 2.0f);
    layer.q_norm = vector(head_dim, 2.0f), layer.k_norm = vector(head_dim, 2.0f);
    layer.qkv = panels(qkv, hidden), layer.qkv_bias = vector(qkv, 1.0f);
    layer.o = panels(hidden, heads * head_dim), layer.o_bias = vector(hidden, 1.0f);
    layer.gate_up = panels(2 * inner, hidden), layer.gate_up_bias = vector(2 * inner, 1.0f);
    layer.down = panels(hidden, inner), layer.down_bias = vector(hidden, 1.0f);
    of.push_back(layer);
  }
  auto cos = numbers(positions * head_dim / 2, 90, 1.0f), sin = numbers(cos.size(), 91, 1.0f);
  auto cache_k = values<T>(layers * blocks * block * kv_heads * head_dim, 92), cache_v = values<T>(cache_k.size(), 93);
  StackShape shape{layers, hidden, heads, kv_heads, head_dim, inner, vocab, positions, 1e-6f, 0.25f, 0, 1, 1, 1};
  StackWeights<T> weights{of.data(), vector(vocab * hidden, 2.0f), vector(hidden, 2.0f), cos.data(), sin.data()};
  const std::vector<int64_t> tokens = {1, 60, 7, 8, 30}, places = {10, 11, 20, 21, 22}, slots = {26, 27, 52, 53, 54};
  const std::vector<int32_t> tables = {5, 3, 0, 4, 2, 6}, queries = {0, 2, 5}, lens = {12, 23};
  PageTable pages{tables.data(), lens.data(), 2, 3, block, blocks * block};
  StackStep<T> step{rows, tokens.data(), places.data(), slots.data(), cache_k.data(), cache_v.data(), pages,
                    queries.data(), nullptr, 0};
  std::vector<unsigned char> workspace(shape.workspace_bytes<T>(rows) + 64);
  std::vector<T> out(rows * hidden);
  auto* aligned = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  decoder_stack(shape, weights, step, aligned, out.data(), 1);
  print<T>("decoder_stack", dtype, {&out, &cache_k, &cache_v});
}

template <typename T>
void all(const char* dtype) {
  tokenwise<T>(dtype);
  attention<T>(dtype);
  products<T>(dtype);
  sampling<T>(dtype);
  stack<T>(dtype);
}

}  // namespace

int main() {
  const int64_t n = 4001;
  std::vector<float> x = numbers(n, 41, 95.0f), out(n);
  exp_array(x.data(), out.data(), n);
  print<float>("exp", "float32", {&out});
  for (float& v : x) v = v < 0 ? 0x1p-20f - v : 0x1p-20f + v;
  log_array(x.data(), out.data(), n);
  print<float>("log", "float32", {&out});
  for (float& v : x) v *= 0x1p-7f;
  log1m_array(x.data(), out.data(), n);
  print<float>("log1m", "float32", {&out});
  all<float>("float32");
  all<bf16>("bfloat16");
  return 0;
}
