"""A run whose engines are spread over two processes each."""

import json

import pytest

from tests.train.conftest import Runs
from tests.train.test_weights_way import numbers

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_run_over_two_ranks_is_the_same_with_one_worker_and_two(runs: Runs, ray_head: str) -> None:
    """Its log-probs are the learner's to rounding, and new weights reach every rank: a stale one would show there."""
    settings = ("run.steps=2", "rollout.engine.tensor_parallel=2")
    one, two = (runs.run(f"ranks-{n}", *settings, f"rollout.workers={n}") for n in (1, 2))
    assert numbers(one) == numbers(two)
    for row in (*one, *two):
        assert 0 < row["logprob_gap/mean"] < 1e-5
        assert row["weights/by_store"] >= 1
    events = [json.loads(line) for line in (runs.root / "ranks-1/events.jsonl").read_text().splitlines()]
    (said,) = (event["message"] for event in events if event["kind"] == "ranks")
    assert "2 ranks" in said
