"""Killing a part of a running job, and whether the run ended as if nothing had happened. Owns no Ray head and no job.

Victims are found among the descendants of this process, so the job's Ray head must have been started by it.
"""

import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import psutil

from benchmarks.tools.turns import processes_of
from coordinator.address import Address
from coordinator.admin.client import AdminClient, NoCoordinatorError, RequestRefusedError
from coordinator.admin.credentials import Credentials
from launch.observe.journal import read

VictimName = Literal["trainer", "rollout_worker", "engine", "coordinator", "buffer", "reward_worker", "learner"]
VICTIMS: tuple[VictimName, ...] = get_args(VictimName)
# The event of events.jsonl that says so.
EVENTS: dict[VictimName, str] = {
    "trainer": "trainer_lost",
    "rollout_worker": "worker_lost",
    "engine": "worker_lost",
    "coordinator": "coordinator_lost",
    "buffer": "buffer_lost",
    "reward_worker": "reward_worker_replaced",
    "learner": "learner_lost",
}
_WAIT_S = 10.0  # for a trainer that trains
_POLL_S = 0.05  # a look at every process takes a core 5 ms


@dataclass(frozen=True, slots=True)
class Moment:
    """In RL step `step`, after `share` of the time it took undisturbed."""

    step: int
    share: float

    @classmethod
    def draw(cls, seed: int, steps: int) -> "Moment":
        source = random.Random(seed)
        return cls(source.randint(1, steps), round(source.random(), 3))


@dataclass(frozen=True, slots=True)
class Kill:
    pid: int
    title: str
    at_s: float  # Unix time
    states: dict[str, str]  # of the workers, as the coordinator believed just before


class NothingToKillError(RuntimeError):
    """The job had ended when the moment came."""


def kill_at(
    process: "subprocess.Popen[bytes]",
    run_dir: Path,
    victim: VictimName,
    moment: Moment,
    seconds: dict[int, float],
    *,
    idle_trainers: bool = False,
    by: signal.Signals = signal.SIGKILL,
) -> Kill:
    """Wait for the moment and until there is one, then kill one process of the kind; a trainer while some worker
    trains, if that comes within 10 s and not `idle_trainers`. `seconds`: of each RL step, undisturbed. Raises
    NothingToKillError."""
    while _steps_done(run_dir) < moment.step - 1:
        _alive(process)
        time.sleep(_POLL_S)
    time.sleep(moment.share * seconds[moment.step])
    states, found = _states(run_dir), processes_of(victim)
    deadline_s = time.monotonic() + _WAIT_S
    busy = victim == "trainer" and not idle_trainers
    while not found or (busy and "TRAINING" not in states.values() and time.monotonic() < deadline_s):
        _alive(process)
        time.sleep(_POLL_S)
        states, found = _states(run_dir), processes_of(victim)
    _alive(process)
    chosen = _busiest(found) if victim == "trainer" else random.Random(moment.share).choice(found)
    title = " ".join(chosen.cmdline()).rpartition("/")[2][:80]
    chosen.send_signal(by)
    return Kill(chosen.pid, title, time.time(), states)


def _busiest(found: list[psutil.Process]) -> psutil.Process:
    """The one that computes."""

    def spent_s(process: psutil.Process) -> float:
        try:
            times = process.cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    before = [spent_s(process) for process in found]
    time.sleep(0.03)
    return max(zip(found, before, strict=True), key=lambda pair: spent_s(pair[0]) - pair[1])[0]


def _alive(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        raise NothingToKillError(f"the job had ended (exit code {process.returncode}) when the moment came")


def _steps_done(run_dir: Path) -> int:
    """-1 before the first RL step begins."""
    records = read(run_dir / "metrics.jsonl")
    return max((int(record["step"]) for record in records), default=-1)


def _states(run_dir: Path) -> dict[str, str]:
    address = Address.read(run_dir)
    if address is None:
        return {}
    try:
        with AdminClient(address.admin, Credentials.read(run_dir), timeout_s=1.0) as client:
            return {worker.name: worker.state for worker in client.status().workers}
    except (NoCoordinatorError, RequestRefusedError):
        return {}


def step_seconds(run_dir: Path) -> dict[int, float]:
    """Seconds of each RL step."""
    records = read(run_dir / "metrics.jsonl")
    return {int(r["step"]): float(r["seconds/step"]) for r in records if r["kind"] == "step"}


def reasons(run_dir: Path, victim: VictimName) -> list[str]:
    """What the run said about the loss."""
    return [str(e["message"]) for e in read(run_dir / "events.jsonl") if e["kind"] == EVENTS[victim]]
