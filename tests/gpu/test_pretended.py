"""CUDA without a GPU: tests that need a device, on the pretended one. It changes a whole process, so they run in one
of their own. `make test-gpu-pretended` runs all of them, `make test-all` those that take seconds, `make test` some of
each kind: the device, planted faults, and the budget of waits and copies of each part."""

import subprocess
import sys
from pathlib import Path

import pytest

import tests.pretended

pytestmark = pytest.mark.skipif(tests.pretended.active(), reason="this process has the pretended device")
ROOT = Path(__file__).parents[2]
# A learner's micro-batch is one of its sixteen kinds.
SOME = (
    "test_device or test_faults or waits_once_and_copies or one_upload_and_one_download or publishes_and_moves"
    " or (twelve_kernels and eager and chain)"
    " or (asks_the_device_for_nothing and rl and k3 and checkpointed and bfloat16)"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(["tests/pretended", "-m", "not pretended", "-k", SOME], id="the device and planted faults"),
        pytest.param(["tests/pretended", "-m", "not pretended"], id="all budgets", marks=[pytest.mark.long]),
        pytest.param(
            ["tests/gpu", "-m", "gpu and not pretended", "-k", "qwen2 and not 0.0"], id="the engine against the CPU"
        ),
    ],
)
def test_what_a_gpu_would_run(tests: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.pretended.plugin", "-p", "no:xdist", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
