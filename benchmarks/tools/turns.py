"""Several jobs of one process that take every RL step in turn, so that each is timed under the same conditions.

Owns how jobs are opened, pinned and alternated, and which processes belong to them, not what is compared.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from actors.observer import RunObserver
from benchmarks.alone import AllVouched
from coordinator.address import Address
from coordinator.admin.client import AdminClient
from coordinator.admin.credentials import Credentials
from launch.config import Config
from launch.interrupt import Interrupt
from launch.observe import Observer
from launch.run.job import Job
from launch.run.opening import open_job
from launch.run.rl_step import rl_step
from launch.run.warmup import warm_start

# By parts of a command line; Ray writes an actor's class into its own.
TITLES = {
    "trainer": "actors.spot.child",
    "rollout_worker": "ray::RolloutWorker",
    "engine": "actors.engine.child",
    "coordinator": "ray::CoordinatorActor",
    "buffer": "ray::DataBufferActor",
    "reward_worker": "ray::RewardWorker",
    "learner": "ray::LearnerRank",
}
SETTLE_S = 0.2  # between two jobs' steps, so that background work ends


@contextmanager
def opened(config: Config, run_dir: Path) -> Iterator[Job]:
    """Yield a job that is ready for its first RL step."""
    interrupt = Interrupt()
    with Observer(run_dir, config) as observer:
        initial = warm_start(config, interrupt, RunObserver())
        with open_job(config, observer, interrupt, initial, run_dir, AllVouched()) as job:
            job.learner.begin(config.learner.optimizer, config.run.steps * config.learner.mini_batches)
            job.publish()
            yield job


def processes_of(kind: str) -> list[psutil.Process]:
    """Return processes of the jobs on this process's Ray head, oldest first."""
    found = [process for process in psutil.Process().children(recursive=True) if _is(process, kind)]
    return sorted(found, key=lambda process: process.create_time())


def _is(process: psutil.Process, kind: str) -> bool:
    try:
        return any(TITLES[kind] in part for part in process.cmdline())
    except psutil.Error:
        return False  # it has ended in the meantime


def pin(seen: set[int]) -> dict[str, list[int]]:
    """Pin the engine and the trainer of the workers not yet in `seen`, one core per worker. Returns the cores."""
    cores = sorted(os.sched_getaffinity(0))
    pinned: dict[str, list[int]] = {}
    for index, worker in enumerate(p for p in processes_of("rollout_worker") if p.pid not in seen):
        seen.add(worker.pid)
        core = cores[index % len(cores)]
        for child in worker.children():
            for kind in ("engine", "trainer"):
                if _is(child, kind):
                    pinned.setdefault(kind, []).append(core)
                    for thread in child.threads():
                        with suppress(ProcessLookupError):
                            os.sched_setaffinity(thread.id, {core})
    return pinned


def wait_for_trainers(run_dir: Path, workers: int, timeout_s: float = 120.0) -> AdminClient:
    """Return the admin service's client, once `workers` workers in total have registered with their trainers up."""
    deadline_s = time.monotonic() + timeout_s
    while (address := Address.read(run_dir)) is None or len(processes_of("trainer")) < workers:
        if time.monotonic() > deadline_s:
            sys.exit(f"{run_dir.name}: its trainers are not up after {timeout_s:g} s")
        time.sleep(0.2)
    time.sleep(5.0)  # a warm start: a first micro-step on nothing
    return AdminClient(address.admin, Credentials.read(run_dir))


def take_turns(jobs: Mapping[str, Job], steps: int) -> dict[str, list[float]]:
    """Return the seconds of every RL step of every job; another job begins each turn."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for step in range(steps):
        turn = step % len(names)
        for name in (*names[turn:], *names[:turn]):
            begin_s = time.monotonic()
            rl_step(jobs[name])
            seconds[name].append(time.monotonic() - begin_s)
            time.sleep(SETTLE_S)
        row = "  ".join(f"{name} {seconds[name][-1]:.2f} s" for name in names)
        print(f"step {step + 1:3d}/{steps}  {row}", flush=True)
    return seconds
