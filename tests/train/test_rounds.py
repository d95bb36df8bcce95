"""Rounds by length in whole runs: what is sampled and learned follows from token counts, not from workers or time."""

import signal
from pathlib import Path

import pytest

from benchmarks.same_losses import first_difference
from launch.observe.journal import read
from launch.run.train import EXIT_INTERRUPTED
from tests.train.conftest import Runs
from tests.train.killing import Moment, kill_at, reasons
from tests.train.test_lookahead import digest
from tests.train.test_resume import start, wait_for_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
# An epoch of 24 prompts in 6 RL steps, and one step of the next.
EPOCH = (
    *("rollout.sampling={temperature: 0.8, max_new_tokens: 120, stop_strings: [x]}", "rollout.rollouts_per_prompt=3"),
    *("data.limit=24", "run.steps=7"),
    *("observe.samples_per_step=1000", "eval.every=4", "rollout.engine.kv_tokens=16384"),
)
ROUNDS = (*EPOCH, "rollout.rounds={factor: 1.5, quantile: 0.5}")
METRICS = ("rounds/long", "rounds/sampled", "rounds/mark", "rounds/waiting", "rounds/longest")


@pytest.fixture(scope="module")
def alone(runs: Runs, ray_head: str) -> Path:
    """One worker, undisturbed."""
    rows = runs.run("rounds", *ROUNDS)
    assert {row["rounds/sampled"] for row in rows} == {4.0, 6.0}
    assert max(row["rounds/waiting"] for row in rows) > 0
    assert sum(row.get("lookahead/checked_tokens", 0.0) for row in rows) > 0, "what is put off keeps its text"
    return runs.root / "rounds"


def prompts(folder: Path, steps: range) -> list[str]:
    """Of every response of these RL steps, sorted."""
    return sorted(row["prompt"] for row in read(folder / "samples.jsonl") if row["step"] in steps)


def test_over_an_epoch_each_prompt_is_learned_from_exactly_as_often(runs: Runs, alone: Path) -> None:
    rows = runs.steps("rounds")
    learned = prompts(alone, range(1, 7))
    assert {learned.count(prompt) for prompt in learned} == {3}
    assert len(set(learned)) == 24
    assert rows[5]["rounds/waiting"] == 0
    without = runs.alone(*EPOCH).texts
    assert len(without) == len(runs.texts("rounds")) == 7 * 12


def test_the_same_in_one_process_without_ray(runs: Runs, alone: Path) -> None:
    here = runs.alone(*ROUNDS)
    assert here.texts == runs.texts("rounds")
    for name in METRICS:
        assert [row.get(name) for row in here.rows] == [row.get(name) for row in runs.steps("rounds")], name


@pytest.mark.parametrize(
    ("workers", "extra"),
    [(2, ("rollout.probe_first=true", "rollout.engine.max_running=4")), pytest.param(3, (), marks=pytest.mark.long)],
)
def test_the_same_with_more_workers_and_probes(runs: Runs, alone: Path, workers: int, extra: tuple[str, ...]) -> None:
    name = f"rounds-{workers}"
    runs.run(name, *ROUNDS, f"rollout.workers={workers}", *extra)
    assert first_difference(alone, runs.root / name) is None
    assert digest(runs.root / name) == digest(alone)


@pytest.mark.long
def test_a_run_that_is_killed_in_parts_stopped_and_resumed_is_the_undisturbed_one(
    runs: Runs, alone: Path, ray_head: str
) -> None:
    extra, name = (*ROUNDS, "rollout.workers=2"), "rounds-killed"
    process, folder = start(runs, ray_head, name, *extra), runs.root / name
    kill_at(process, folder, "rollout_worker", Moment(2, 0.5), {2: 0.1})
    kill_at(process, folder, "engine", Moment(3, 0.5), {3: 0.1})
    wait_for_steps(runs, name, process, 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == EXIT_INTERRUPTED, (runs.root / f"{name}.log").read_text()
    runs.run(name, *extra, resume=True)
    assert first_difference(alone, folder) is None
    assert digest(folder) == digest(alone)
    assert reasons(folder, "rollout_worker")
