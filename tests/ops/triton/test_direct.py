"""Direct launches: to the driver they are what Triton's own dispatch would have made of the plan."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.harness import ROOT


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.direct_calls"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_a_direct_call_reaches_the_driver_as_a_planned_one_does(found: list[dict[str, Any]]) -> None:
    """The same variant of the same kernel, grid, stream, numbers and addresses, with the second call's tensors."""
    calls = [row for row in found if "rows" in row]
    layers = [row for row in found if "layers" in row]
    assert len({row["plan"] for row in calls}) == len({row["plan"] for row in layers}) == 12
    for row in (*calls, *layers):
        assert row["planned"] == 0, row["plan"]
        assert row["directly"] == row["by_plan"], row["plan"]
        assert row["directly"], row["plan"]
    new = [row["remembered"] for row in calls]
    third = len(new) // 3
    assert new == [1] * third + [1] * third + [0] * third, "each shape is planned once, whatever came between"


@pytest.mark.parametrize(("case", "planned"), [("unaligned", 4), ("twice", 4), ("many", 5)])
def test_what_is_no_usual_call_is_planned_every_time(found: list[dict[str, Any]], case: str, planned: int) -> None:
    (row,) = [row for row in found if row["plan"] == case]
    assert row["planned"] == planned
    assert row.get("kept", 0) <= 3


def test_kernels_of_layers_start_early_until_they_are_to_be_launched_apart(found: list[dict[str, Any]]) -> None:
    """On Hopper: kernels of a layer are launched so, and no others; after a failed capture none is."""
    (apart,) = [row for row in found if row["plan"] == "apart"]
    assert apart["turned"] == [True, False]
    assert "early: True" not in json.dumps(apart["reached"])
    for row in found:
        if "directly" in row:
            between = row["plan"] in ("plan_sample", "plan_sample_topk", "plan_cutoff")
            for launched in (*row["directly"], *row["by_plan"]):
                assert launched[5].endswith(f"early: {not between}"), row["plan"]
