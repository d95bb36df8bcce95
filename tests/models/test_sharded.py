"""FSDP2 over 1 and 2 gloo ranks trains exactly the network that one plain process trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.checkpoint import hf_state_dict, load_causal_model
from tests.models.families import saved
from tests.models.sharded import LENGTHS, STEPS, train


@pytest.mark.parametrize(
    ("name", "implementation", "ranks", "recompute"),
    [
        ("qwen3-tied-biases", "native", 2, "keep"),
        ("qwen2", "native", 2, "recompute"),
        ("llama", "native", 1, "keep"),
        ("qwen3-tied-biases", "transformers", 2, "keep"),
    ],
)
def test_ranks_train_the_same_network(
    name: str, implementation: str, ranks: int, recompute: str, tmp_path: Path
) -> None:
    saved(name, tmp_path / "model")
    alone = load_causal_model(tmp_path / "model")
    expected_losses = train(alone, list(range(len(LENGTHS))), ranks=1)

    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "tests.models.sharded"]
    shared = [str(tmp_path / "store"), str(tmp_path / "model"), str(tmp_path), implementation, recompute]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), *shared],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for child in children:
            _, errors = child.communicate(timeout=150)
            assert child.returncode == 0, errors[-3000:]
    finally:
        for child in children:
            child.kill()

    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for step in range(STEPS):
        assert sum(losses[step] for losses, _ in results) == pytest.approx(expected_losses[step], rel=1e-5)
    assert expected_losses[1] < expected_losses[0]
    expected = hf_state_dict(alone)
    for _, found in results:
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-5, rtol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
