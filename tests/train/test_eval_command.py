"""`paceline eval` of a run, and of a checkpoint of it: what the run itself found there."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.commands.eval_target import find
from launch.commands.status import read_run_status
from launch.run.evaluate import evaluate
from tests.train.conftest import SHARP, STEPS, Runs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


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
