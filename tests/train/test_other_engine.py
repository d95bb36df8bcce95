"""A whole run on an engine that is not the learner's network: log-probs at the sampling temperature only, tokens that
depend on nothing that could be repeated. The engine is the fake one, in the place of vLLM."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from config.model import ModelOptions
from config.rollout import EngineOptions
from launch.report.summary import summarise
from launch.run import opening
from tests.actors.fake_engine import FakeEngine, FakeOptions
from tests.train.conftest import Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

VLLM = ("rollout.engine.backend=vllm", "rollout.max_logprob_gap=1e9", "eval.every=1", "checkpoint.every=1")


def spawn(model: ModelOptions, engine: EngineOptions, **_: object) -> FakeEngine:
    assert engine.backend == "vllm"
    return FakeEngine(FakeOptions(step_s=0.0, logprobs_t1=False))


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_run_without_log_probs_at_temperature_1_learns_evaluates_and_resumes(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "spawn_engine", spawn)
    steps = runs.run("other", *VLLM, "run.steps=2", "rollout.sampling.temperature=0.5", "learner.mini_batches=2")
    folder = runs.root / "other"
    for row in steps:
        assert row["groups/used"] > 0
        assert np.isfinite([row["loss/mean"], row["grad_norm/mean"], row["logprob_gap/k3"]]).all()
        # What the fake says of its tokens has nothing to do with the learner, which finds them far less likely.
        assert row["logprob_gap/mean"] > 1
        assert row["logprob_gap/k1"] > 1
        assert 0 < row["sampler_correction/weight"] < 0.5
        assert row["logprob_gap/ratio"] < row["logprob_gap/ratio_max"] < 10
    assert len(runs.evaluations("other")) == 3
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["objective"]["sampler_correction"]["weights"] == "token"
    assert summarise(folder).correction == "by token, weights up to 2"
    (said,) = [event for event in events(folder) if event["kind"] == "not_repeatable"]
    assert "goes on with other noise" in said["message"]
    again = runs.run(
        "other", *VLLM, "run.steps=3", "rollout.sampling.temperature=0.5", "learner.mini_batches=2", resume=True
    )
    assert [row["step"] for row in again] == [1, 2, 3]
    assert (folder / "model" / "config.json").is_file()
    assert (folder / "report.html").is_file()


@pytest.mark.long
def test_an_engine_that_disagrees_stops_the_run_also_without_them(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "spawn_engine", spawn)
    with pytest.raises(Exception, match=r"log-probs of the sampled tokens differ .*rollout-0"):
        runs.run("disagrees", "rollout.engine.backend=vllm", "run.steps=1")
