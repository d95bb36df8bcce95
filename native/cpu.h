// Which of the compiled variants this process runs, chosen once: every kernel of a process, and every process on a
// machine, uses the same one, so that results are comparable bitwise. They may differ between kinds of CPU.
#pragma once

namespace paceline {

// AVX-512 with its bfloat16 instructions (AMD Zen 4, Intel Cooper Lake and Sapphire Rapids, and later). The environment
// variable PACELINE_CPU=avx2 turns it off: for tests, and for bitwise agreement with machines that lack it.
bool has_avx512();

}  // namespace paceline
