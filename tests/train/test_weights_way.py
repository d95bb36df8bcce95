"""A run computes the same numbers whichever way new weights take to the engines."""

from typing import Any

import pytest

from tests.train.conftest import Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def numbers(steps: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    return [(row["loss/mean"], row["reward/mean"], row["tokens/generated"]) for row in steps]


def test_losses_are_bitwise_those_of_the_object_store(runs: Runs) -> None:
    store = runs.run("by-store", "run.steps=3", "rollout.workers=2")
    broadcast = runs.run("by-broadcast", "run.steps=3", "rollout.workers=2", "cluster.weights=broadcast")
    shared = runs.run("by-ipc", "run.steps=3", "rollout.workers=2", "cluster.weights=ipc", "learner.ranks=1")
    assert numbers(broadcast) == numbers(shared) == numbers(store)
    for steps, way in ((store, "store"), (broadcast, "broadcast"), (shared, "ipc")):
        for row in steps:
            assert row[f"weights/by_{way}"] == 2
            assert row["weights/bytes"] > 0


def test_phases_of_memory_change_no_number(runs: Runs) -> None:
    """Engines sleep while the learner works, and its optimizer's state is away while they decode."""
    stays = runs.run("stays", "run.steps=3", "rollout.workers=2")
    moves = runs.run("moves", "run.steps=3", "rollout.workers=2", "cluster.offload=always", "cluster.weights=ipc")
    assert numbers(moves) == numbers(stays)
    assert "memory_phases" in (runs.root / "moves" / "events.jsonl").read_text()
    assert "engine_awake" not in (runs.root / "moves" / "events.jsonl").read_text()
