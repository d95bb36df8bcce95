// The compiled variant that this process runs, chosen once. Every kernel of a process, and every process on a machine,
// uses the same one, so that results are comparable bitwise. They may differ between kinds of CPU.
//
// The environment variable PACELINE_CPU=avx2|avx512|amx is an upper limit: for tests, and for bitwise agreement with
// lesser machines.
#pragma once

namespace paceline {

enum class CpuLevel {
  kAvx2,
  kAvx512,  // with its bfloat16 and VNNI instructions: AMD Zen 4, Intel Cooper Lake and later
  kAmx,     // plus tiles of bfloat16 and int8: Intel Sapphire Rapids and later, if Linux permits them
};

// Throws std::invalid_argument if PACELINE_CPU names no level.
CpuLevel cpu_level();
const char* name_of(CpuLevel level);

inline bool has_avx512() { return cpu_level() >= CpuLevel::kAvx512; }
// Tile registers hold nothing between two kernels: each kernel configures and releases them.
inline bool has_amx() { return cpu_level() >= CpuLevel::kAmx; }

}  // namespace paceline
