"""A signal to the run's whole process group (Ctrl-C at a terminal, `timeout`, Slurm) is a signal to the run: it writes
a checkpoint, says how to go on, and leaves nothing. Resumed, it is the undisturbed run."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run.train import EXIT_INTERRUPTED
from tests.train.conftest import SHARP, Runs
from tests.train.test_in_process import LEARNED
from tests.train.test_ray_lost import environment, left, sessions
from tests.train.test_resume import wait_for_steps

__all__ = ["sessions"]
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
SETTINGS = SHARP, "checkpoint.every=0", "eval.every=0"


def begin(
    runs: Runs, name: str, environment: dict[str, str], before: tuple[str, ...] = ()
) -> "subprocess.Popen[bytes]":
    """The command line as the leader of a process group, as a shell starts it; two RL steps on."""
    command = [*before, sys.executable, "-m", "launch", "train", str(runs.config)]
    command += runs.overrides(name, "run.steps=400", *SETTINGS)
    with (runs.root / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT, process_group=0)
    wait_for_steps(runs, name, process, 2)
    return process


def check_stopped(runs: Runs, name: str) -> None:
    """It says how to go on, holds its last step, and goes on to what no signal would have disturbed."""
    log = (runs.root / f"{name}.log").read_text()
    assert log.count("--resume") == 1, log
    assert "Traceback" not in log
    assert '"kind":"failed"' not in (runs.root / name / "events.jsonl").read_text()
    done = len(runs.steps(name))
    assert (runs.root / name / f"checkpoints/step_{done:06d}").is_dir()
    steps = f"run.steps={done + 1}"
    resumed, alone = runs.run(name, steps, *SETTINGS, resume=True), runs.alone(steps, *SETTINGS)
    assert [{key: row[key] for key in LEARNED} for row in resumed] == [
        {key: row[key] for key in LEARNED} for row in alone.rows
    ]
    assert runs.texts(name) == alone.texts


@pytest.mark.parametrize(
    ("number", "times"),
    [
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.long),
    ],
)
def test_a_signal_to_the_group_of_a_run_with_a_head_of_its_own(
    number: signal.Signals, times: int, runs: Runs, sessions: Path
) -> None:
    """The second SIGINT ends it at once, but for the checkpoint of the last complete step."""
    name = f"group-{number.name}-{times}"
    process = begin(runs, name, environment(sessions))
    for _ in range(times):
        os.killpg(process.pid, number)
    assert process.wait(120) == EXIT_INTERRUPTED, (runs.root / f"{name}.log").read_text()
    assert left(sessions) == []
    check_stopped(runs, name)


@pytest.mark.long
def test_a_signal_to_the_group_of_a_run_on_another_head(runs: Runs, ray_head: str) -> None:
    process = begin(runs, "group-attached", {**os.environ, "RAY_ADDRESS": ray_head})
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(120) == EXIT_INTERRUPTED
    check_stopped(runs, "group-attached")


@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs coreutils' timeout")
def test_timeout_ends_a_run_with_a_checkpoint(runs: Runs, sessions: Path) -> None:
    """It signals the run, then the whole group: the run is asked twice. SIGALRM says that the time is over."""
    process = begin(runs, "timeout", environment(sessions), ("timeout", "1h"))
    process.send_signal(signal.SIGALRM)
    assert process.wait(120) == 124, "timeout's own exit code"
    assert left(sessions) == []
    check_stopped(runs, "timeout")
