"""What stands between the simulator and what it is compared with: inputs that can be read, and arithmetic."""

from pathlib import Path

import pytest

from experiments.simulate_here import compared, shared
from experiments.simulate_papers import CHANGES, Cell, Unit, cells, error_of, scenario_of_cell
from policies.calibration.document import Calibration, CalibrationKey, PassCost

KEY = CalibrationKey(model="m", precision="float32", device="d")


def test_every_cell_of_the_papers_is_a_scenario_and_so_is_every_change() -> None:
    of_file = {}
    for cell in cells(Path("sweep.csv")):
        scenario_of_cell(cell, cell.method)
        of_file[cell.file] = cell
    for cell in of_file.values():
        for values in CHANGES[cell.file].values():
            scenario_of_cell(cell, values)


@pytest.mark.parametrize(
    ("unit", "paper", "ours", "error"),
    [
        ("step x", (2.0, 2.0), 1.5, -0.25),
        ("step x", (1.7, 2.1), 2.0, 0.0),
        ("step x", (1.7, 2.0), 2.2, 0.1),
        ("rollout cut", (0.5, float("inf")), 0.4, -0.1),
        ("rollout cut", (0.5, float("inf")), 0.9, 0.0),
    ],
)
def test_an_error_is_relative_to_the_nearer_end_of_what_a_paper_says(
    unit: Unit, paper: tuple[float, float], ours: float, error: float
) -> None:
    cell = Cell(claim="", case="", file="tlt", unit=unit, paper=paper)
    assert error_of(cell, ours) == pytest.approx(error)


def test_engines_side_by_side_and_the_rest_of_the_program_share_the_cores() -> None:
    assert shared([100, 80, 50], 0.0, 2) == [1.0, 1.25, 2.0]
    assert shared([100, 80, 50], 1.0, 2) == [1.0, 1.25 * 1.5, 2.0 * 1.5]


def test_runs_that_took_what_was_measured_are_predicted_without_error(tmp_path: Path) -> None:
    lengths = [[100] * 128] * 3  # 16 prompts of 8, in two workers
    passes = [PassCost(requests=64, rows=64, context_tokens=64 * n, seconds=0.01, count=5) for n in (1, 20, 200)]
    seconds = {"rollout": 1.0, "reward_wait": 0.1, "learn": 1.28, "publish": 0.01, "sync": 0.02, "step": 2.5}
    measured = {
        "shape": {
            "vocab_size": 228,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_layers": 3,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 64,
        },
        "prompt_tokens": 10,
        "max_running": 64,
        "kv_tokens": 32768,
        "cores": 2,
        "calibration": Calibration.measured(KEY, passes).model_dump(mode="json"),
        "rates": [100.0, 100.0],
        "reference": {"seconds": [seconds] * 3, "lengths": lengths, "other_cores": 0.0},
        "runs": {"2": {"seconds": [seconds] * 3, "lengths": lengths, "other_cores": None}},
    }
    (row,) = compared({"demo": measured}, tmp_path)
    assert row["learn"][2] == pytest.approx(0.0, abs=1e-3)
    assert row["rollout"][2] == pytest.approx(0.0, abs=0.1)  # prompts are computed first
    assert row["step"][2] == pytest.approx(0.0, abs=0.05)
