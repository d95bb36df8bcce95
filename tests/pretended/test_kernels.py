"""The Triton kernels themselves inside the engine: tests/gpu with every operator of ours run by the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.pretended
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("test_cuda.py", "test_the_engine_draws_from_the_models_distribution and 1.0-qwen3"),
        ("test_cuda.py", "test_batch_invariant_log_probs"),
        ("test_eagle.py", "test_a_few_drafts_are_exactly_the_cpus"),
        ("test_self.py", "test_a_few_drafts_with_the_kernels_themselves"),
    ],
)
def test_the_engine_computes_the_same_with_the_kernels_interpreted(file: str, tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.pretended.plugin", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "--timeout", "1000", f"tests/gpu/{file}", "-k", tests],
        cwd=ROOT,
        env=os.environ | {"PACELINE_PRETENDED_KERNELS": "triton"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
