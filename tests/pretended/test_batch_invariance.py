"""`model.batch_invariant: engine` on a GPU: every product and every attention of a step is one of our operators, whose
rows do not know each other (tests/ops/triton); cuBLAS and torch's attention promise nothing."""

from pathlib import Path

import pytest
import torch

from models.transformer import Transformer
from tests.pretended.support import steps_of, target


def kernels_of(tmp_path: Path, invariant: bool, graphs: bool) -> set[str]:
    fast = target(tmp_path)
    model = Transformer(fast.config, dtype=torch.bfloat16, device="cuda", batch_invariant=invariant)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), fast.parameters(), strict=True):
            mine.copy_(theirs)
    return {what for seen in steps_of(model, cuda_graphs=graphs) for what in seen.kernels.whats()}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_no_library_multiplies_in_a_batch_invariant_step(graphs: bool, tmp_path: Path) -> None:
    theirs = ("mm", "matmul", "linear", "attention", "softmax")
    found = {what for what in kernels_of(tmp_path, True, graphs) if any(name in what for name in theirs)}
    assert found
    assert all("paceline" in what for what in found), found
    fast = kernels_of(tmp_path, False, graphs)
    assert any("mm" in what and "paceline" not in what for what in fast), fast
