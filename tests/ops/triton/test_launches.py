"""The table of launches, by which budgets count and predictions are made, against what the launchers do."""

from typing import Any

import pytest
import torch

from models.ops.triton import LAUNCHES, launch, launch_low_bit
from tests.ops.test_operators import arguments

OURS = {name: of for of in (launch, launch_low_bit) for name in LAUNCHES if hasattr(of, name)}


@pytest.mark.parametrize("name", OURS)
def test_an_operator_launches_what_the_table_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[Any] = []
    run = launch.Launch.run

    def counted(self: launch.Launch) -> None:
        kernels.append(self.kernel)
        run(self)

    monkeypatch.setattr(launch.Launch, "run", counted)
    given = list(arguments(torch.float32)[name])
    if name == "paged_attention":
        given[9] = 1024  # max_context: splits, and their merge
    getattr(OURS[name], name)(*given)
    assert len(kernels) == LAUNCHES[name]
