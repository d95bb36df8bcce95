#include "cpu.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(PACELINE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paceline {
namespace {

constexpr CpuLevel kLevels[] = {CpuLevel::kAvx2, CpuLevel::kAvx512, CpuLevel::kAmx};

CpuLevel limit() {
  const char* wanted = std::getenv("PACELINE_CPU");
  if (wanted == nullptr || *wanted == 0) return CpuLevel::kAmx;
  for (CpuLevel level : kLevels)
    if (std::string(wanted) == name_of(level)) return level;
  throw std::invalid_argument("PACELINE_CPU=" + std::string(wanted) +
                              " names no level of CPU: set it to avx2, avx512 or amx, or unset it to use what is there");
}

bool finds_avx512() {
#if defined(PACELINE_AVX512)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// Asks Linux for the 8 KiB of tile registers. The answer holds for the process: for running threads (an OpenMP pool),
// later ones, and children by fork. Refused without AMX, before Linux 5.16, or if a thread's signal stack is too small
// to save them.
bool finds_amx() {
#if defined(PACELINE_AMX)
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

CpuLevel detect() {
  const CpuLevel most = limit();
  if (most < CpuLevel::kAvx512 || !finds_avx512()) return CpuLevel::kAvx2;
  return most < CpuLevel::kAmx || !finds_amx() ? CpuLevel::kAvx512 : CpuLevel::kAmx;
}

}  // namespace

CpuLevel cpu_level() {
  static const CpuLevel level = detect();
  return level;
}

const char* name_of(CpuLevel level) {
  return level == CpuLevel::kAvx2 ? "avx2" : level == CpuLevel::kAvx512 ? "avx512" : "amx";
}

}  // namespace paceline
