"""Whole runs with low-bit rollouts: engine and learner multiply the same integers, whatever else a run does."""

import json
from typing import Any

import pytest

from launch.precision import precision_text
from launch.report import write_report
from launch.report.summary import summarise
from tests.train.conftest import SHARP, Runs
from tests.train.test_determinism import learning

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

W8A8 = "rollout.quantization=w8a8"


@pytest.fixture(scope="module")
def plain(runs: Runs, ray_head: str) -> list[dict[str, Any]]:
    """One worker, plain decoding, weights through the store, no interruption."""
    return runs.run("w8a8", SHARP, W8A8, "rollout.speculation.mode=off")


def test_engine_and_learner_compute_the_same_and_fewer_bytes_travel(
    runs: Runs, plain: list[dict[str, Any]], base: list[dict[str, Any]]
) -> None:
    assert all(row["groups/used"] > 0 and row["grad_norm/mean"] > 0 for row in plain)
    assert max(row["logprob_gap/mean"] for row in plain) <= 1e-6
    for low, full in zip(plain, base, strict=True):
        assert low["weights/bytes"] < 0.6 * full["weights/bytes"]  # the embedding stays as it is
        assert low["weights/quantise_s"] > 0
    assert runs.texts("w8a8") != runs.texts("base"), "rounding has an effect"


def test_the_last_weights_are_evaluated_in_both_precisions(runs: Runs, plain: list[dict[str, Any]]) -> None:
    *before, last = runs.evaluations("w8a8")
    assert not any("eval/master_reward" in metrics for metrics in before)
    note = json.loads((runs.root / "w8a8/model/evaluation.json").read_text())
    rewards = {"w8a8": last["eval/reward"], "float32": last["eval/master_reward"]}
    assert note == {"step": len(plain), "weights": "float32", "evaluated_as": "w8a8", "eval/reward": rewards}
    summary = summarise(runs.root / "w8a8")
    assert (summary.eval_last, summary.eval_masters) == (last["eval/reward"], last["eval/master_reward"])
    assert summary.precision == "rollouts in w8a8, which the learner mirrors; what it trains in float32"
    assert "which the learner mirrors" in write_report(runs.root / "w8a8").read_text()
    assert "eval/master_reward" in (runs.root / "w8a8/metrics.jsonl").read_text()


@pytest.mark.long
def test_workers_drafts_training_hand_over_and_a_resume_change_nothing(runs: Runs, plain: list[dict[str, Any]]) -> None:
    everything = (
        *(
            SHARP,
            W8A8,
            "rollout.workers=2",
            "drafter.train=true",
            "drafter.while_it_pays=false",
            "drafter.micro_step_tokens=64",
        ),
        *("cluster.weights=broadcast", "cluster.offload=always", "checkpoint.every=1"),
    )
    runs.run("w8a8-all", *everything, "run.steps=3")  # ends with engines that hold full precision
    rows = runs.run("w8a8-all", *everything, resume=True)
    assert learning(rows) == learning(plain)
    assert runs.texts("w8a8-all") == runs.texts("w8a8")
    assert runs.evaluations("w8a8-all")[-1] == runs.evaluations("w8a8")[-1]
    assert any("speculation/share" in row for row in rows)


def test_an_unaligned_run_goes_on_and_its_gap_is_a_metric(runs: Runs, plain: list[dict[str, Any]]) -> None:
    rows = runs.alone(SHARP, W8A8, "learner.quantization=none", "run.steps=3").rows
    assert len(rows) == 3
    assert all(1e-5 < row["logprob_gap/mean"] < 0.1 for row in rows)
    events = [json.loads(line) for line in (runs.root / "w8a8/events.jsonl").read_text().splitlines()]
    (said,) = [event["message"] for event in events if event["kind"] == "precision"]
    assert said == precision_text("w8a8", "rollout", "float32")
    assert "not aligned" in precision_text("w8a8", "none", "float32")
