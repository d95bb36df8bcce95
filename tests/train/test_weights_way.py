"""A run computes the same numbers whichever way new weights take to the engines."""

import json
from typing import Any

import pytest

from benchmarks.same_losses import first_difference
from tests.params import long
from tests.train.conftest import Alone, Runs
from tests.train.killing import Moment, VictimName, kill_at
from tests.train.test_resume import start

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def numbers(steps: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    return [(row["loss/mean"], row["reward/mean"], row["tokens/generated"]) for row in steps]


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Alone:
    """In one process, where nothing is handed over."""
    return runs.alone("run.steps=3")


@pytest.mark.parametrize("way", ["broadcast", *long("store")])  # ipc: below, with engines that sleep
def test_losses_are_bitwise_those_of_one_process(runs: Runs, ray_head: str, alone: Alone, way: str) -> None:
    steps = runs.run(f"by-{way}", "run.steps=3", "rollout.workers=2", f"cluster.weights={way}")
    assert numbers(steps) == numbers(alone.rows)
    for row in steps:
        assert row[f"weights/by_{way}"] == 2
        assert row["weights/bytes"] > 0
    events = (json.loads(line) for line in (runs.root / f"by-{way}/events.jsonl").read_text().splitlines())
    (said,) = (event["message"] for event in events if event["kind"] == "weights_way")
    assert said.startswith(f"{way} for 2 workers: ")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_losses_are_bitwise_the_same_by_what_changed(runs: Runs, ray_head: str, quantization: str) -> None:
    """By the store, by a broadcast, and by shared memory."""
    settings = ["run.steps=3", "rollout.workers=2", "model.dtype=bfloat16", "learner.optimizer.lr=1e-6"]
    settings += [f"rollout.quantization={quantization}", "eval.every=0"]
    whole = runs.run(f"whole-{quantization}", *settings)
    assert [row["weights/by_delta"] for row in whole] == [0, 0, 0]
    for way in ("store", "broadcast", "ipc"):
        name = f"by-delta-{way}-{quantization}"
        steps = runs.run(name, *settings, "cluster.weights_delta=always", f"cluster.weights={way}")
        assert numbers(steps) == numbers(whole)
        assert runs.texts(name) == runs.texts(f"whole-{quantization}")
        assert [row["weights/by_delta"] for row in steps] == [2, 2, 2]  # before the first step they were whole
        assert all(0 < row["weights/delta_bytes"] < row["weights/bytes"] / 5 for row in steps)
        assert "weights_delta_refused" not in (runs.root / name / "events.jsonl").read_text()
        print(f"{name}: {[(row['weights/delta_bytes'], row['weights/bytes']) for row in steps]}")


@pytest.mark.long
def test_phases_of_memory_change_no_number(runs: Runs, ray_head: str, alone: Alone) -> None:
    """Engines sleep while the learner works, and its optimizer's state is away while they decode."""
    moves = runs.run("moves", "run.steps=3", "rollout.workers=2", "cluster.offload=always", "cluster.weights=ipc")
    assert numbers(moves) == numbers(alone.rows)
    assert [row["weights/by_ipc"] for row in moves] == [2, 2, 2]
    assert "memory_phases" in (runs.root / "moves" / "events.jsonl").read_text()
    assert "engine_awake" not in (runs.root / "moves" / "events.jsonl").read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_engines_and_workers_cost_no_number_whichever_way_weights_take(runs: Runs, ray_head: str) -> None:
    """With drafters that are trained meanwhile, whose trainers read the target's new weights from the store's copy."""
    settings = (
        "rollout.workers=2",
        "drafter.train=true",
        "drafter.while_it_pays=false",
        "run.steps=5",
        "checkpoint.every=0",
        "eval.every=0",
    )
    runs.run("undisturbed", *settings)
    process = start(runs, ray_head, "disturbed", *settings, "cluster.weights=broadcast", "cluster.offload=always")
    folder = runs.root / "disturbed"
    victims: dict[int, VictimName] = {2: "engine", 4: "rollout_worker"}
    for step, victim in victims.items():
        kill_at(process, folder, victim, Moment(step, 0.5), {step: 0.1})
    assert process.wait(240) == 0, (runs.root / "disturbed.log").read_text()
    assert first_difference(runs.root / "undisturbed", folder) is None
    steps = runs.steps("disturbed")
    assert sum(row["weights/by_broadcast"] for row in steps) >= 4  # of 10; who is starting then gets the store's
    events = (folder / "events.jsonl").read_text().splitlines()
    assert "worker_lost" in {json.loads(line)["kind"] for line in events}
