"""Ray's own processes are killed or stopped under a run with a head of its own: it ends, says so, leaves nothing.

Each run has its own folder for Ray's sessions (RAY_TMPDIR), so that what it leaves can be told from anybody else's.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch.cluster.processes import MARK, processes_below
from launch.errors import RayLostError
from tests.train.conftest import Runs
from tests.train.test_resume import wait_for_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def sessions() -> Iterator[Path]:
    """A short path: it holds Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="pl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def environment(sessions: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"RAY_TMPDIR": str(sessions)}


def begin(runs: Runs, name: str, sessions: Path, *extra: str) -> "subprocess.Popen[bytes]":
    """The command line with a head of its own, two RL steps on."""
    command = [sys.executable, "-m", "launch", "train", str(runs.config)]
    command += runs.overrides(name, "run.steps=400", "checkpoint.every=1", "eval.every=0", *extra)
    with (runs.root / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(sessions), stdout=log, stderr=log, cwd=ROOT)
    wait_for_steps(runs, name, process, 2)
    return process


def server(process: "subprocess.Popen[bytes]", name: str) -> psutil.Process:
    (found,) = (child for child in psutil.Process(process.pid).children() if child.name() == name)
    return found


def left(sessions: Path, within_s: float = 20.0) -> list[int]:
    """What has not ended `within_s` seconds after the run: on a busy machine a killed process goes later."""
    deadline_s = time.monotonic() + within_s
    while found := [pid for pid in processes_below(sessions) if pid != os.getpid()]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    return found


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("raylet", signal.SIGKILL, "Ray's raylet (process {pid}) has ended"),
        pytest.param("gcs_server", signal.SIGKILL, "Ray's GCS (process {pid}) has ended", marks=pytest.mark.long),
        pytest.param("raylet", signal.SIGSTOP, "cluster.ray_timeout_s", marks=pytest.mark.long),
    ],
    ids=["raylet killed", "GCS killed", "raylet stopped"],
)
def test_a_run_that_loses_ray_ends_with_one_message(
    name: str, number: signal.Signals, words: str, runs: Runs, sessions: Path
) -> None:
    run = f"{name}-{number.name}"
    process = begin(runs, run, sessions, "cluster.ray_timeout_s=1")
    victim = server(process, name)
    victim.send_signal(number)
    ended = process.wait(90)
    log = (runs.root / f"{run}.log").read_text()
    assert ended == RayLostError.exit_code, log
    assert words.format(pid=victim.pid) in log
    assert log.count("--resume") == 1
    assert "[state-dump]" not in log
    assert "Traceback" not in log
    assert '"kind":"failed"' in (runs.root / run / "events.jsonl").read_text()
    deadline = psutil.wait_procs([psutil.Process(pid) for pid in left(sessions) if psutil.pid_exists(pid)], timeout=30)
    assert deadline[1] == []


def test_what_a_killed_driver_leaves_is_ended_by_the_next_start(runs: Runs, sessions: Path) -> None:
    process = begin(runs, "driver-killed", sessions)
    process.kill()
    process.wait(30)
    (marked,) = {path.resolve() for path in sessions.glob(f"ray/session_*/{MARK}")}
    agents = left(sessions)
    assert agents, "Ray left nothing: is this still needed?"
    script = "from launch.cluster.session import ray_session\nwith ray_session(): pass"
    subprocess.run([sys.executable, "-c", script], env=environment(sessions), cwd=ROOT, check=True, timeout=120)
    assert left(sessions) == []
    assert not marked.exists()
