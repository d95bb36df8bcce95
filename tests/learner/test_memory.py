"""A learner's process keeps the memory that its operations free."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from actors.learner import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
for turn in range(22):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [np.full(size << 18, 1.0, np.float32) for size in (1, 50, 5, 70)]  # MiB
    del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_results_of_the_same_sizes_come_without_page_faults() -> None:
    def faults(way: str) -> int:
        command = [sys.executable, "-c", PROGRAM, way]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < faults("free") / 10
