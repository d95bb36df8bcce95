"""CUDA without a GPU: tests that need a device, on the pretended one. It changes a whole process, so they run in one
of their own; `make test-gpu-pretended` runs all of them, the short ones run here."""

import subprocess
import sys
from pathlib import Path

import pytest

import tests.pretended

pytestmark = pytest.mark.skipif(tests.pretended.active(), reason="this process has the pretended device")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(["tests/pretended", "-m", "not pretended"], id="the device, its budgets and planted faults"),
        pytest.param(
            ["tests/gpu", "-m", "gpu and not pretended", "-k", "qwen2 and not 0.0"], id="the engine against the CPU"
        ),
    ],
)
def test_what_a_gpu_would_run(tests: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.pretended.plugin", "-p", "no:xdist", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
