"""Several jobs of one process that take every RL step in turn, so that each is timed under the same conditions.

Owns how jobs are opened, pinned and alternated, and the interval of paired ratios; never decides what is compared.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.tools.chaos import TITLES
from coordinator.address import Address
from coordinator.admin.client import AdminClient
from launch.config import Config
from launch.interrupt import Interrupt
from launch.observe import Observer
from launch.run.job import Job, open_job
from launch.run.rl_step import rl_step
from launch.run.warmup import warm_start

SETTLE_S = 0.2  # between two jobs' steps: what the last one left behind comes to an end
RESAMPLES = 10_000


@contextmanager
def opened(config: Config, run_dir: Path) -> Iterator[Job]:
    """A job that is ready for its first RL step."""
    interrupt = Interrupt()
    with Observer(run_dir, config) as observer:
        initial = warm_start(config, interrupt, lambda _done, _total: None, lambda _message: None)
        with open_job(config, observer, interrupt, initial, run_dir) as job:
            job.learner.begin(config.learner.optimizer, config.run.steps * config.learner.mini_batches)
            job.publish()
            yield job


def pin(seen: set[int]) -> dict[str, list[int]]:
    """Pin the engine and the trainer of the workers that are not in `seen` yet, one core per worker; which cores."""
    cores = sorted(os.sched_getaffinity(0))
    pinned: dict[str, list[int]] = {}
    workers = [p for p in _children() if _is(p, "rollout_worker") and p.pid not in seen]
    for index, worker in enumerate(sorted(workers, key=lambda process: process.create_time())):
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


def _is(process: psutil.Process, kind: Any) -> bool:
    try:
        return any(TITLES[kind] in part for part in process.cmdline())
    except psutil.Error:
        return False


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def wait_for_trainers(run_dir: Path, workers: int, timeout_s: float = 120.0) -> AdminClient:
    """The admin service's client, once so many workers in all have registered with their trainers up."""
    deadline_s = time.monotonic() + timeout_s
    while (address := Address.read(run_dir)) is None or sum(_is(p, "trainer") for p in _children()) < workers:
        if time.monotonic() > deadline_s:
            sys.exit(f"{run_dir.name}: its trainers are not up after {timeout_s:g} s")
        time.sleep(0.2)
    time.sleep(5.0)  # they start warm: a first micro-step on nothing
    return AdminClient(address.admin)


def take_turns(jobs: Mapping[str, Job], steps: int) -> dict[str, list[float]]:
    """Seconds of every RL step of every job; another job begins each turn."""
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


def interval(ratios: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Median of paired ratios with its bootstrap 95 % interval."""
    values = np.asarray(ratios)
    draws = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[draws], axis=1), [0.025, 0.975])
    return {"median": round(median(ratios), 4), "low": round(float(low), 4), "high": round(float(high), 4)}
