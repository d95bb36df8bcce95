"""Every part of a run with drafter training is killed once, in one run: it ends as if nothing had happened, and says
what was lost. At random moments, one part a run: PACELINE_CHAOS_RUNS=20 PACELINE_SEED=0 with `-m long`."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.data_buffer import DataBufferActor
from benchmarks.same_losses import first_difference
from config.drafter import BufferOptions
from launch.drafter.watch import DrafterWatch
from tests.context import Heard
from tests.train.conftest import Runs
from tests.train.killing import EVENTS, Moment, NothingToKillError, VictimName, kill_at, reasons, step_seconds
from tests.train.test_resume import start

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
SETTINGS = (
    "rollout.workers=2",
    "drafter.train=true",
    "drafter.while_it_pays=false",
    "run.steps=8",
    "checkpoint.every=0",
    "eval.every=0",
)
VICTIMS: tuple[VictimName, ...] = (
    *("trainer", "engine", "buffer", "rollout_worker", "coordinator", "reward_worker", "learner"),
)

RANDOM, SEED = int(os.environ.get("PACELINE_CHAOS_RUNS", "1")), int(os.environ.get("PACELINE_SEED", "0"))
ATTEMPTS = 3  # to find something to kill


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    runs.run("whole", *SETTINGS)
    return runs.root / "whole"


@pytest.mark.long
def test_a_run_of_which_every_part_is_killed_once_is_the_same_run(runs: Runs, whole: Path, ray_head: str) -> None:
    process = start(runs, ray_head, "killed-parts", *SETTINGS)
    folder = runs.root / "killed-parts"
    for step, victim in enumerate(VICTIMS, start=1):
        kill_at(process, folder, victim, Moment(step, 0.5), {step: 0.1}, idle_trainers=True)
    assert process.wait(240) == 0, (runs.root / "killed-parts.log").read_text()
    assert first_difference(whole, folder) is None
    for victim in VICTIMS:
        assert reasons(folder, victim), f"nothing was said about the {victim}: no {EVENTS[victim]} in events.jsonl"
    assert "SIGKILL" in reasons(folder, "trainer")[0]
    assert any("SIGKILL" in reason for reason in reasons(folder, "engine"))


@pytest.mark.long
def test_sigterm_to_a_worker_or_its_engine_costs_seconds_and_no_token(runs: Runs, whole: Path, ray_head: str) -> None:
    """A worker gives its requests back and is replaced, long before rollout.weight_sync_timeout_s (300 s)."""
    process = start(runs, ray_head, "terminated", *SETTINGS)
    folder = runs.root / "terminated"
    victims: dict[int, VictimName] = {2: "rollout_worker", 4: "engine", 6: "rollout_worker"}
    for step, victim in victims.items():
        kill_at(process, folder, victim, Moment(step, 0.5), {step: 0.1}, by=signal.SIGTERM)
    assert process.wait(240) == 0, (runs.root / "terminated.log").read_text()
    assert first_difference(whole, folder) is None
    told = reasons(folder, "rollout_worker")
    assert len(told) >= 2, told
    assert "it received SIGTERM" in told[0]  # the others may hit what was still starting
    assert any("signal SIGTERM" in reason for reason in told), told


@pytest.mark.long
@pytest.mark.parametrize("index", range(RANDOM))
def test_a_run_of_which_a_part_is_killed_at_a_random_moment_is_the_same_run(
    runs: Runs, whole: Path, ray_head: str, index: int
) -> None:
    """A moment that comes too late, when the job is over, is drawn again."""
    victim, seconds = VICTIMS[index % len(VICTIMS)], step_seconds(whole)
    for attempt in range(ATTEMPTS):
        name = f"random-{index}-{attempt}"
        process = start(runs, ray_head, name, *SETTINGS)
        moment = Moment.draw(1000 * SEED + 10 * index + attempt, len(seconds))
        try:
            kill_at(process, runs.root / name, victim, moment, seconds, idle_trainers=True)
        except NothingToKillError:
            assert process.wait(240) == 0, (runs.root / f"{name}.log").read_text()
            continue
        assert process.wait(240) == 0, (runs.root / f"{name}.log").read_text()
        assert first_difference(whole, runs.root / name) is None, moment
        assert reasons(runs.root / name, victim), f"nothing was said about the {victim}"
        return
    pytest.fail(f"no moment was found in {ATTEMPTS} runs")


def test_one_other_loss_or_length_is_a_difference(runs: Runs, base: list[dict[str, Any]], tmp_path: Path) -> None:
    """The comparison can fail."""
    whole = runs.root / "base"
    for name, old, new, found in (
        ("metrics", '"loss/mean":', '"loss/mean":0,"x":', "loss/mean"),
        ("lengths", '"lengths":[', '"lengths":[0,', "lengths.jsonl"),
    ):
        copy = tmp_path / name
        copy.mkdir()
        for file in ("metrics.jsonl", "lengths.jsonl", "samples.jsonl"):
            text = (whole / file).read_text()
            (copy / file).write_text(text.replace(old, new, 1) if file.startswith(name) else text)
        assert found in (first_difference(whole, copy) or "")
    assert first_difference(whole, whole) is None


class Other:
    """Any actor."""


def test_a_loss_is_said_once_whether_or_not_anyone_asked_before_it_was_back() -> None:
    buffer = ray.remote(DataBufferActor).options(num_cpus=0, max_restarts=-1).remote(BufferOptions(), seed=0)
    coordinator = ray.remote(Other).options(num_cpus=0, max_restarts=-1).remote()
    told = Heard()
    watch = DrafterWatch(coordinator, {"node-1": buffer}, told)
    assert _pid(buffer) > 0  # both are up, and the watch has not been asked yet
    assert _pid(coordinator) > 0
    assert watch.look()["node-1"].sequences == 0
    assert told == []
    for count, (actor, expected) in enumerate([(buffer, "buffer_lost"), (coordinator, "coordinator_lost")], start=1):
        os.kill(_pid(actor), signal.SIGKILL)
        while len(told) < count or "node-1" not in watch.look():
            watch.look()
        watch.look()
        assert [kind for kind, _ in told[count - 1 :]] == [expected]
    os.kill(_pid(buffer), signal.SIGKILL)
    while _pid(buffer) == 0:
        pass
    assert "node-1" in watch.look()
    assert [kind for kind, _ in told[2:]] == ["buffer_lost"]
    for actor in (buffer, coordinator):
        ray.kill(actor)


def _pid(actor: Any) -> int:
    """Its process; 0 while it has none."""
    try:
        return int(ray.get(actor.__ray_call__.remote(lambda _self: os.getpid()), timeout=60))
    except ray.exceptions.RayError:
        return 0
