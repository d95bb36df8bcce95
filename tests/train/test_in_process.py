"""launch.local: a run in one process without Ray is the run on Ray, token for token and bit for bit."""

import json
from typing import Any

import pytest

import paceline
from tests.train.conftest import SHARP, Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LEARNED = (
    *("loss/mean", "grad_norm/mean", "reward/mean", "groups/used", "tokens/generated", "logprob_gap/mean", "lr"),
    "length/mean",
)


def test_a_run_in_one_process_has_the_tokens_rewards_and_losses_of_the_program(
    runs: Runs, base: list[dict[str, Any]]
) -> None:
    alone = runs.alone(SHARP)
    assert [{name: row[name] for name in LEARNED} for row in alone.rows] == [
        {name: row[name] for name in LEARNED} for row in base
    ]
    assert alone.texts == runs.texts("base")
    assert alone.evaluations == runs.evaluations("base")


def test_trained_locally_the_run_has_the_folder_of_the_run_on_ray(runs: Runs, base: list[dict[str, Any]]) -> None:
    """With speculation, as `base`: metrics, samples, evaluations and the model's bytes."""
    run = paceline.train(runs.config, *runs.overrides("local", SHARP), backend="local")
    assert [{name: row[name] for name in LEARNED} for row in run.steps()] == [
        {name: row[name] for name in LEARNED} for row in base
    ]
    assert (runs.texts("local"), runs.evaluations("local")) == (runs.texts("base"), runs.evaluations("base"))
    here, there = (
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in (run.model, runs.root / "base/model")
    )
    assert "model.safetensors" in here
    assert here == there
    assert (run.path / "report.html").is_file()
    assert json.loads((run.path / "summary.json").read_text())["status"] == "finished"
    assert (run.path / "speculation.jsonl").read_text().count("\n") == len(base)
    assert not (run.path / "checkpoints").exists()
