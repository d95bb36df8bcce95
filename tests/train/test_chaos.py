"""Every part of a run with drafter training is killed once, in one run: it ends as if nothing had happened, and says
what was lost. `python -m benchmarks.chaos` does the same to the demo, at random moments."""

import os
import signal
from pathlib import Path

import pytest
import ray

from actors.data_buffer import DataBufferActor
from benchmarks.tools.chaos import EVENTS, Moment, VictimName, difference, kill_at, reasons
from launch.drafter_watch import DrafterWatch
from policies.drafter.options import BufferOptions
from tests.train.conftest import Runs
from tests.train.test_resume import start

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
SETTINGS = ("rollout.workers=2", "drafter.train=true", "run.steps=7", "checkpoint.every=0", "eval.every=0")
VICTIMS: tuple[VictimName, ...] = ("trainer", "engine", "buffer", "rollout_worker", "coordinator")


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    runs.run("whole", *SETTINGS)
    return runs.root / "whole"


def test_a_run_of_which_every_part_is_killed_once_is_the_same_run(runs: Runs, whole: Path, ray_head: str) -> None:
    process = start(runs, ray_head, "killed-parts", *SETTINGS)
    folder = runs.root / "killed-parts"
    for step, victim in enumerate(VICTIMS, start=1):
        kill_at(process, folder, victim, Moment(step, 0.5), {step: 0.1}, idle_trainers=True)
    assert process.wait(120) == 0, (runs.root / "killed-parts.log").read_text()
    assert difference(whole, folder) is None
    for victim in VICTIMS:
        assert reasons(folder, victim), f"nothing was said about the {victim}: no {EVENTS[victim]} in events.jsonl"
    assert "SIGKILL" in reasons(folder, "trainer")[0]
    assert any("SIGKILL" in reason for reason in reasons(folder, "engine"))


def test_one_other_loss_or_length_is_a_difference(whole: Path, tmp_path: Path) -> None:
    """The comparison can fail."""
    for name, old, new, found in (
        ("metrics", '"loss/mean":', '"loss/mean":0,"x":', "loss/mean"),
        ("lengths", '"lengths":[', '"lengths":[0,', "lengths.jsonl"),
    ):
        copy = tmp_path / name
        copy.mkdir()
        for file in ("metrics.jsonl", "lengths.jsonl", "samples.jsonl"):
            text = (whole / file).read_text()
            (copy / file).write_text(text.replace(old, new, 1) if file.startswith(name) else text)
        assert found in (difference(whole, copy) or "")
    assert difference(whole, whole) is None


class NoCoordinator:
    """Answers as an actor does, and never dies."""

    def endpoint(self) -> str:
        return "tcp://127.0.0.1:1"


def test_a_lost_buffer_is_said_once_whether_or_not_it_is_back(tmp_path: Path) -> None:
    buffer = ray.remote(DataBufferActor).options(num_cpus=0, max_restarts=-1).remote(BufferOptions(), seed=0)
    coordinator = ray.remote(NoCoordinator).options(num_cpus=0).remote()
    told: list[tuple[str, str]] = []
    watch = DrafterWatch(coordinator, {"node-1": buffer}, tmp_path, lambda *event: told.append(event))
    pid = ray.get(buffer.__ray_call__.remote(_fill), timeout=60)
    found = watch.look()
    assert (found["node-1"].sequences, told) == (1, [])
    os.kill(pid, signal.SIGKILL)
    while "node-1" not in (found := watch.look()):
        assert len(told) <= 1
    assert found["node-1"].sequences == 0
    watch.look()
    assert [kind for kind, _ in told] == ["buffer_lost"]
    for actor in (buffer, coordinator):
        ray.kill(actor)


def _fill(actor: DataBufferActor) -> int:
    """One sequence; returns the process."""
    import numpy as np

    from drafter.training.records import SequenceRecord

    states = np.zeros((9, 16), np.uint8)
    actor._buffer.add([SequenceRecord(np.arange(10, dtype=np.int32), 2, 0, states, "float32", 4, 1)])
    return os.getpid()
