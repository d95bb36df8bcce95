// Tile registers of AMX as functions, and how a kernel gets them.
//
// Only for files compiled with AMX flags. Everything is local, since these files serve other CPUs than the rest.
// Written with asm, because the compilers' intrinsics take no template arguments and do not declare that they read
// memory.
#pragma once

#include <cstdint>

#include "linear.h"

namespace paceline {
namespace {

constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = kTileRows * kTileRowBytes;

// The thread's tile registers during its lifetime: another library that uses them (oneDNN) reconfigures them. All eight
// have rows of 64 bytes; register i has `rows[i]` rows.
class Tiles {
 public:
  explicit Tiles(const uint8_t (&rows)[8]) {
    struct alignas(64) Layout {
      uint8_t palette, start_row, unused[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } layout{};
    layout.palette = 1;
    for (int i = 0; i < 8; ++i) layout.row_bytes[i] = kTileRowBytes, layout.rows[i] = rows[i];
    asm volatile("ldtilecfg %0" ::"m"(layout));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Tile registers of a block of kM times 16 rows and up to 4 / kM panels: sums in 0 to 3, then x; the weights take turns
// in the others.
template <int kM>
constexpr int sums_tile(int m, int n) {
  return m * (4 / kM) + n;
}
template <int kM>
constexpr int weight_tile(int n) {
  return kM == 1 ? 5 + n % 3 : 6 + n % 2;
}

template <int kTile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// Rows of 64 bytes, `apart` bytes from one to the next; fast if they begin on cache lines.
template <int kTile>
inline void load_tile(const void* from, int64_t apart = kTileRowBytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(apart), "i"(kTile) : "memory");
}
// The same for data without reuse: it does not fill the first-level cache.
template <int kTile>
inline void stream_tile(const void* from) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{kTileRowBytes}), "i"(kTile) : "memory");
}
template <int kTile>
inline void store_tile(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t{kTileRowBytes}), "i"(kTile) : "memory");
}

template <int kSums, int kA, int kB>
inline void add_products_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
}

// A [rows][64] signed bytes times B [16][16][4] signed, or unsigned, bytes: exact in int32, except for wrapping.
template <int kSums, int kA, int kB>
inline void add_products_signed() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
}
template <int kSums, int kA, int kB>
inline void add_products_unsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
}

// f(Index<0>), ..., f(Index<kEnd - 1>): a loop whose counter may name a register.
template <int kValue>
struct Index {
  static constexpr int value = kValue;
};
template <int kEnd, int kFirst = 0, typename Function>
__attribute__((always_inline)) inline void unrolled(Function f) {
  if constexpr (kFirst < kEnd) {
    f(Index<kFirst>{});
    unrolled<kEnd, kFirst + 1>(f);
  }
}

}  // namespace
}  // namespace paceline
