"""Two evaluations side by side: differences, their standard errors, and what cannot be compared."""

import json
import math
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from launch.commands.eval_show import COMPARISON, show_comparison, standard_errors, write_comparison
from launch.observe import Observer
from tests.launch.test_observer import make_config


def evaluation(folder: Path, rewards: dict[str, dict[str, float]], **metrics: float) -> Path:
    """A folder as `paceline eval` leaves it; `rewards`: of sets by prompt."""
    with Observer(folder, make_config()) as observer:
        observer.evaluation(0, {f"eval/{name}": value for name, value in metrics.items()})
        for name, of in rewards.items():
            observer.judged(0, [{"set": name, "uid": uid, "reward": reward} for uid, reward in of.items()])
    return folder


def test_differences_and_standard_errors(tmp_path: Path) -> None:
    base = evaluation(tmp_path / "b", {"eval": {"a": 0, "b": 0, "c": 0.5, "gone": 1}}, reward=0.375, length_mean=20)
    trained = evaluation(tmp_path / "t", {"eval": {"a": 1, "b": 0, "c": 1.0, "new": 0}}, reward=0.5, length_mean=8)
    found = write_comparison(base, trained)
    deviation = math.sqrt(((1 - 0.5) ** 2 + (0 - 0.5) ** 2 + 0) / 2)
    error = found["metrics"]["eval/reward"].pop("standard_error")
    assert error == pytest.approx(deviation / math.sqrt(3))
    assert found["metrics"]["eval/reward"] == {"base": 0.375, "trained": 0.5, "difference": 0.125}
    assert found["metrics"]["eval/length_mean"]["difference"] == -12
    assert json.loads((trained / COMPARISON).read_text())["metrics"]["eval/length_mean"]["trained"] == 8
    assert not (base / COMPARISON).exists()
    out = StringIO()
    show_comparison(base, trained, Console(file=out, width=80))
    (line,) = (line.split() for line in out.getvalue().splitlines() if "length_mean" in line)
    assert line == ["length_mean", "20", "8", "-12"]


def test_of_several_sets_each_has_its_own_and_a_single_prompt_has_none(tmp_path: Path) -> None:
    base = evaluation(tmp_path / "b", {"x": {"a": 0, "b": 0}, "y": {"a": 0}}, reward=0.0)
    trained = evaluation(tmp_path / "t", {"x": {"a": 1, "b": 0}, "y": {"a": 1}}, reward=0.75)
    assert standard_errors(base, trained) == {"eval/x/reward": pytest.approx(0.5)}


def test_a_metric_that_one_has_not_has_no_difference(tmp_path: Path) -> None:
    base = evaluation(tmp_path / "b", {}, reward=0.5)
    trained = evaluation(tmp_path / "t", {}, reward=0.5, master_reward=0.25)
    row = write_comparison(base, trained)["metrics"]["eval/master_reward"]
    assert row == {"base": None, "trained": 0.25, "difference": None, "standard_error": None}
    out = StringIO()
    show_comparison(base, trained, Console(file=out, width=80))
    assert "base and trained:" not in out.getvalue()
