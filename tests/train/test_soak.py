"""A run of many RL steps holds as much memory, and as many files and threads, at its end as after its first steps."""

import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from benchmarks.tools.turns import TITLES
from launch.observe.journal import read
from tests.train.conftest import SHARP, Runs
from tests.train.test_ray_lost import environment, sessions

__all__ = ["sessions"]
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
STEPS, EVERY, WARM = 500, 20, 150  # RL steps: all, between two samples, that fill caches
SMALL = (
    "rollout.workers=2",
    "rollout.prompts_per_step=2",
    "rollout.rollouts_per_prompt=4",
    "rollout.sampling.max_new_tokens=12",
    "checkpoint.every=100",
    "eval.every=100",
)
# Bytes per RL step above which memory is held to grow without end. Measured: driver 9,500, while its workers' streams
# did not end (launch.dispatch.seat.STREAM_LISTS), GCS and raylet 6,500, others at most 2,400. Of the driver 500 were of
# Python: the metrics that launch.observe.symptoms keeps. Dispatcher, collector and observer held 15 more bytes a step
# over 600 steps of benchmarks.driver_fakes, Ray 83 bytes for each object of a stream, and nothing for a call, though
# freed memory of its threads stays with the process. The GCS 54,000 before launch/cluster/session.py bounded what it
# keeps of tasks.
GROWTH = defaultdict(lambda: 8_000, driver=20_000, gcs_server=20_000, raylet=20_000)
MORE = 4  # files or threads that a process may hold above the most it held before WARM


class Held(NamedTuple):
    """What a process holds after so many RL steps."""

    step: int
    anonymous_bytes: int
    files: int
    threads: int


def parts(process: "subprocess.Popen[bytes]") -> Iterator[tuple[str, psutil.Process]]:
    """The run's processes by what they are; Ray's own servers too."""
    driver = psutil.Process(process.pid)
    yield "driver", driver
    for child in driver.children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            words = " ".join(child.cmdline())
            kind = next((kind for kind, title in TITLES.items() if title in words), None)
            if kind is not None or child.name() in ("raylet", "gcs_server"):
                yield kind or child.name(), child


def held(process: psutil.Process, step: int) -> Held:
    """Anonymous memory: pages of a library count as private as soon as no other process maps them."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    anonymous = int(status.partition("RssAnon:")[2].split()[0]) * 1024
    return Held(step, anonymous, process.num_fds(), process.num_threads())


def samples(process: "subprocess.Popen[bytes]", metrics: Path) -> dict[str, list[Held]]:
    """Of each process, every EVERY steps until the run has ended."""
    seen: dict[str, list[Held]] = defaultdict(list)
    next_step = EVERY
    while process.poll() is None:
        done = sum(row["kind"] == "step" for row in read(metrics)) if metrics.exists() else 0
        if done < next_step:
            time.sleep(0.2)
            continue
        next_step = done + EVERY
        for kind, each in parts(process):
            with suppress(psutil.Error, OSError):
                seen[f"{kind} {each.pid}"].append(held(each, done))
    return seen


def test_nothing_grows(runs: Runs, sessions: Path) -> None:
    command = [sys.executable, "-m", "launch", "train", str(runs.config)]
    command += runs.overrides("soak", SHARP, f"run.steps={STEPS}", *SMALL)
    log = runs.root / "soak.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment(sessions), stdout=file, stderr=file, cwd=ROOT)
    try:
        seen = samples(process, runs.root / "soak/metrics.jsonl")
    finally:
        process.kill()
    assert process.returncode == 0, log.read_text()
    grown, looked_at = [], set[str]()
    for name, rows in seen.items():
        before, after = ([row for row in rows if (row.step > WARM) is late] for late in (False, True))
        if not before or len(after) < 8:
            continue  # it was replaced in the middle
        kind = name.partition(" ")[0]
        looked_at.add(kind)
        slope = statistics.linear_regression([row.step for row in after], [row.anonymous_bytes for row in after]).slope
        print(f"{name}: {slope:.0f} bytes a step, {after[-1]}")  # pytest -s shows it
        if slope > GROWTH[kind]:
            grown.append(f"{name} grows by {slope / 1000:.0f} kB a step: {after[0]} to {after[-1]}")
        for what in ("files", "threads"):
            most = max(getattr(row, what) for row in before)
            if getattr(after[-1], what) > most + MORE:
                grown.append(f"{name} holds {getattr(after[-1], what)} {what}, at most {most} before: {after[-1]}")
    assert {"driver", "rollout_worker", "engine", "learner", "reward_worker", "gcs_server", "raylet"} <= looked_at
    assert grown == []
