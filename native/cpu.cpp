#include "cpu.h"

#include <cstdlib>
#include <cstring>

namespace paceline {
namespace {

bool detect() {
#if defined(PACELINE_AVX512)
  const char* wanted = std::getenv("PACELINE_CPU");
  if (wanted != nullptr && std::strcmp(wanted, "avx2") == 0) return false;
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace

bool has_avx512() {
  static const bool has = detect();
  return has;
}

}  // namespace paceline
