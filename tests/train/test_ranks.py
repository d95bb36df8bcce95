"""A run whose engines are spread over two processes each."""

import json
from typing import Any

import pytest

from tests.train.conftest import Runs
from tests.train.test_weights_way import numbers

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SAME = [pytest.param(*of, marks=pytest.mark.long) for of in (("store", 2), ("ipc", 1))]


SETTINGS = ("run.steps=2", "rollout.engine.tensor_parallel=2")


@pytest.fixture(scope="module")
def one(runs: Runs, ray_head: str) -> list[dict[str, Any]]:
    """One worker, weights by the store."""
    rows = runs.run("ranks-one", *SETTINGS)
    assert all(row["weights/by_store"] >= 1 for row in rows)
    return rows


@pytest.mark.parametrize(("way", "workers"), [("broadcast", 2), *SAME])
def test_a_run_over_two_ranks_is_the_same_run_with_any_workers_and_way_of_weights(
    runs: Runs, one: list[dict[str, Any]], way: str, workers: int
) -> None:
    """Log-probs are the learner's to rounding: stale weights would show there."""
    rows = runs.run(f"ranks-{way}", *SETTINGS, f"rollout.workers={workers}", f"cluster.weights={way}")
    assert numbers(rows) == numbers(one)
    assert all(row[f"weights/by_{way}"] >= workers for row in rows)
    assert all(0 < row["logprob_gap/mean"] < 1e-5 for row in (*one, *rows))
    events = [json.loads(line) for line in (runs.root / "ranks-one/events.jsonl").read_text().splitlines()]
    (said,) = (event["message"] for event in events if event["kind"] == "ranks")
    assert "2 ranks" in said
