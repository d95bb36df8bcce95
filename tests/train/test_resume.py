"""Runs that are killed or interrupted, and resumed, end as if nothing had happened."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.training.checkpoint import latest_checkpoint
from launch.config import load_config
from launch.run.checkpoints import DRAFTERS_DIR
from launch.run.train import EXIT_INTERRUPTED
from tests.train.conftest import SHARP, STEPS, Runs
from tests.train.test_determinism import learning

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def start(runs: Runs, ray_head: str, name: str, *extra: str) -> "subprocess.Popen[bytes]":
    """The command line, in a process of its own, on the test session's Ray."""
    command = [sys.executable, "-m", "launch", "train", str(runs.config), *runs.overrides(name, *extra)]
    environment = {**os.environ, "RAY_ADDRESS": ray_head}
    with (runs.root / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=Path(__file__).parents[2])


def learner_processes() -> set[int]:
    """Of runs on this process's Ray head."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if process.cmdline()[:1] and process.cmdline()[0].startswith(("ray::LearnerRank", "ray::learner")):
                found.add(process.pid)
    return found


def wait_for_steps(runs: Runs, name: str, process: "subprocess.Popen[bytes]", steps: int) -> None:
    """However long that takes: the test's own limit ends what hangs."""
    while len(runs.steps(name)) < steps:
        assert process.poll() is None, (runs.root / f"{name}.log").read_text()
        time.sleep(0.05)


def test_sigkill_at_a_random_moment(runs: Runs, ray_head: str, base: list[dict[str, Any]]) -> None:
    settings = SHARP, "checkpoint.every=1"
    seed = time.time_ns()
    moment = random.Random(seed)
    process = start(runs, ray_head, "killed", *settings)
    wait_for_steps(runs, "killed", process, moment.randint(2, STEPS - 2))  # so there is a checkpoint
    time.sleep(moment.uniform(0, 1.0))
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    saved = latest_checkpoint(runs.root / "killed/checkpoints")
    assert saved is not None
    assert any((saved / DRAFTERS_DIR).iterdir())
    resumed = runs.run("killed", *settings, resume=True)
    assert learning(resumed) == learning(base), f"moment {seed}"
    assert runs.texts("killed") == runs.texts("base")


@pytest.mark.long
def test_ctrl_c_checkpoints_and_stops(runs: Runs, ray_head: str) -> None:
    process = start(runs, ray_head, "interrupted", "checkpoint.every=0", "run.steps=200")
    wait_for_steps(runs, "interrupted", process, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(240) == EXIT_INTERRUPTED
    log = (runs.root / "interrupted.log").read_text()
    assert "--resume" in log
    done = len(runs.steps("interrupted"))
    assert (runs.root / f"interrupted/checkpoints/step_{done:06d}").is_dir()
    resumed = runs.run("interrupted", f"run.steps={done + 1}", resume=True)
    assert [row["step"] for row in resumed] == list(range(1, done + 2))


@pytest.mark.long
def test_a_lost_learner_rank_ends_the_run_with_the_command_that_resumes_it(runs: Runs, ray_head: str) -> None:
    """Where no restart is allowed. By SIGTERM, which Ray's own handler sees; a rank lost by SIGKILL is in
    tests/learner/test_group."""
    name = "rank-lost"  # of no other file: runs of an older one would be counted
    before = learner_processes()
    process = start(runs, ray_head, name, "checkpoint.every=1", "run.steps=200", "learner.max_restarts=0")
    wait_for_steps(runs, name, process, 2)  # so there is a checkpoint
    (learner,) = learner_processes() - before
    os.kill(learner, signal.SIGTERM)
    assert process.wait(240) == 1
    log = (runs.root / f"{name}.log").read_text()
    assert "--resume" in log
    assert "rank 0" in log
    assert f"its process {learner} has ended: killed" in log
    assert "actor_id" not in log
    assert "Worker ID" not in log  # what Ray says of it is in the run's log


@pytest.mark.long
def test_a_new_run_sets_an_older_one_aside_and_keeps_its_own_overrides(runs: Runs, base: list[dict[str, Any]]) -> None:
    overrides = SHARP, "run.steps=1", "run.seed=1", "objective.clip_high=0.31"
    shutil.copytree(runs.root / "base", runs.root / "twice", symlinks=True)
    rows = runs.run("twice", *overrides)
    assert learning(runs.steps("twice.1")) == learning(base)
    assert runs.texts("twice.1") == runs.texts("base")
    assert load_config(runs.root / "twice/config.yaml", []).config.objective.clip_high == 0.31
    assert learning(rows) != learning(base[:1]), "another seed is another run"
