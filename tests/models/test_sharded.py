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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [("llama", "native", "keep")]),
        (
            2,
            [
                ("qwen3-tied-biases", "native", "keep"),
                ("qwen2", "native", "recompute"),
            ],
        ),
        pytest.param(2, [("qwen3-tied-biases", "transformers", "keep")], marks=pytest.mark.long),
    ],
)
def test_ranks_train_the_same_network(ranks: int, cases: list[tuple[str, str, str]], tmp_path: Path) -> None:
    arguments = [str(ranks), str(tmp_path / "store")]
    for number, (name, implementation, recompute) in enumerate(cases):
        saved(name, tmp_path / f"{number}" / "model")
        arguments.append(f"{tmp_path / str(number)}:{implementation}:{recompute}")
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.models.sharded", str(rank), *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for child in children:
            _, errors = child.communicate(timeout=200)
            assert child.returncode == 0, errors[-3000:]
    finally:
        for child in children:
            child.kill()
    for number in range(len(cases)):
        check_against_one_process(tmp_path / str(number), ranks)


def check_against_one_process(case: Path, ranks: int) -> None:
    alone = load_causal_model(case / "model")
    expected_losses = train(alone, list(range(len(LENGTHS))), ranks=1)
    results = [torch.load(case / f"{rank}.pt") for rank in range(ranks)]
    for step in range(STEPS):
        assert sum(losses[step] for losses, _ in results) == pytest.approx(expected_losses[step], rel=1e-5)
    assert expected_losses[1] < expected_losses[0]
    expected = hf_state_dict(alone)
    for _, found in results:
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-5, rtol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
