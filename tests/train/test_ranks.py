"""A run whose engines are spread over two processes each."""

import json

import pytest

from tests.train.conftest import Runs
from tests.train.test_weights_way import numbers

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_run_over_two_ranks_is_the_same_run_with_one_worker_or_two(runs: Runs, ray_head: str) -> None:
    """And whichever way new weights take. Log-probs are the learner's to rounding: stale weights would show there."""
    settings = ("run.steps=2", "rollout.engine.tensor_parallel=2")
    one, two = (runs.run(f"ranks-{n}", *settings, f"rollout.workers={n}") for n in (1, 2))
    assert numbers(one) == numbers(two)
    for row in (*one, *two):
        assert 0 < row["logprob_gap/mean"] < 1e-5
        assert row["weights/by_store"] >= 1
    shared = runs.run("ranks-ipc", *settings, "rollout.workers=1", "cluster.weights=ipc")
    pieces = runs.run("ranks-broadcast", *settings, "rollout.workers=2", "cluster.weights=broadcast")
    assert numbers(shared) == numbers(pieces) == numbers(one)
    assert all(row["weights/by_ipc"] == 1 for row in shared)
    assert all(row["weights/by_broadcast"] == 2 for row in pieces)
    events = [json.loads(line) for line in (runs.root / "ranks-1/events.jsonl").read_text().splitlines()]
    (said,) = (event["message"] for event in events if event["kind"] == "ranks")
    assert "2 ranks" in said
