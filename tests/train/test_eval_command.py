"""`paceline eval` of a run, and of a checkpoint of it: what the run itself found there."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.commands.eval_show import COMPARISON, show_comparison
from launch.commands.eval_target import base_of, find
from launch.commands.status import read_run_status
from launch.run.evaluate import evaluate, evaluate_each
from tests.train.conftest import SHARP, STEPS, Runs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.mark.long
def test_a_run_and_its_checkpoint_are_evaluated_as_the_run_did(
    runs: Runs, base: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, *_, last = runs.evaluations("base")
    target = find(runs.root / "base", [f"run.dir={tmp_path}", "eval.at=[1]"])
    with target.weights() as config:
        metrics, folder = evaluate(config)
    assert metrics["eval/reward"] == last["eval/reward"]
    rows = [json.loads(line) for line in (folder / "eval_samples.jsonl").read_text().splitlines()]
    assert len(rows) == 8, "all responses"
    assert {row["set"] for row in rows} == {"eval"}
    assert read_run_status(folder).state == "finished"
    again = find(runs.root / "base/checkpoints" / f"step_{STEPS:06d}", [f"run.dir={tmp_path}", SHARP])
    with again.weights() as config:
        assert evaluate(config)[0] == last
    assert first != last, "else this shows nothing"


def test_beside_the_model_that_the_run_began_with(runs: Runs, base: list[dict[str, Any]], tmp_path: Path) -> None:
    """The run's first and last evaluation, and what lies between them; `base` began with model.path."""
    first, *_, last = runs.evaluations("base")
    target = find(runs.root / "base", [f"run.dir={tmp_path}"])
    with target.weights() as config:
        began, trained = evaluate_each([base_of(target), config])
    assert (began[0], trained[0]) == (first, last)
    assert began[1].name.startswith("base-base.eval-")
    out = StringIO()
    show_comparison(began[1], trained[1], Console(file=out, width=100))
    found = json.loads((trained[1] / COMPARISON).read_text())
    assert found["base"] == {"model": str(runs.root / "model"), "folder": str(began[1])}
    assert found["trained"]["model"] == str(runs.root / "base/model")
    assert found["metrics"].keys() == first.keys()
    for name, row in found["metrics"].items():
        assert (row["base"], row["trained"], row["difference"]) == (first[name], last[name], last[name] - first[name])
    assert found["prompts"]["prompts"] == 8
    lines = out.getvalue().splitlines()
    (reward,) = (line.split() for line in lines if line.split()[:1] == ["reward"])
    before, after = first["eval/reward"], last["eval/reward"]
    assert reward[1:4] == [f"{before:.4g}", f"{after:.4g}", f"{after - before:+.4g}"]
    assert sum(line.startswith("base and trained: ") for line in lines) == 1
