"""`paceline status` of a run without a coordinator: from its folder, while it runs and when it has ended."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.commands.cli import app
from launch.commands.status import read_run_status
from launch.config import load_config
from launch.observe import Observer, StepRecord
from launch.run_folder import claim, holder


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def observer(tmp_path: Path, write_config: Callable[[], Path]) -> Observer:
    loaded = load_config(write_config(), ["run.steps=9", "observe.live=false", "observe.tensorboard=false"])
    return Observer(tmp_path / "demo", loaded.config)


def step(number: int) -> StepRecord:
    return StepRecord(step=number, metrics={"reward/mean": 0.25}, seconds={"step": 2.0}, lengths=[3, 4])


def test_a_run_that_runs_says_its_step_its_phase_and_its_last_event(observer: Observer, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with claim(folder):
        observer.step(step(1))
        observer.event("worker_lost", "rollout-1: SIGKILL")
        observer.progress("rollout", 3, 8)
        code, out, err = run("status", str(folder))
        assert (code, err) == (0, "")
        first, now, last, event = out.splitlines()
        assert first.startswith("demo: running (process ")
        assert first.endswith("), 1 of 9 RL steps done")
        assert now.startswith("now:        rollout 3/8 (")
        assert last.startswith("last step:  1 (")
        assert "reward/mean 0.25" in last
        assert event.startswith("last event: worker_lost: rollout-1: SIGKILL (")
        observer.progress("learn")
        assert read_run_status(folder).phase == "learn"
        status = json.loads(run("status", str(folder), "--json")[1])
        assert (status["state"], status["step"], status["steps"]) == ("running", 1, 9)
        code, _, err = run("status", str(folder), "--watch")
        assert code == 1
        assert "has no coordinator to watch" in err
    observer.close()


@pytest.mark.parametrize(("event", "state"), [("finished", "finished"), ("checkpoint", "ended without a word")])
def test_a_run_that_has_ended_says_how(event: str, state: str, observer: Observer, tmp_path: Path) -> None:
    observer.step(step(9))
    observer.event(event, "x")
    observer.close()
    code, out, _ = run("status", str(tmp_path / "demo"))
    assert code == 0
    assert out.startswith(f"demo: {state}, 9 of 9 RL steps done\n")
    assert "now:" not in out


def test_the_newest_run_is_asked_unless_one_is_named(
    observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer.close()
    monkeypatch.chdir(tmp_path)
    assert "give the folder of a run" in run("status")[2]
    (tmp_path / "runs").symlink_to(tmp_path)
    assert run("status")[1].startswith("demo: ended without a word, 0 of 9 RL steps done")
    later = tmp_path / "demo.eval-20261123-200000"
    shutil.copytree(tmp_path / "demo", later)
    assert run("status")[1].startswith("demo: "), "an evaluation is no run"
    code, _, error = run("status", str(tmp_path / "nope"))
    assert (code, "there is no such folder" in " ".join(error.split())) == (1, True)


def test_who_asks_who_holds_a_folder_does_not_hold_it(tmp_path: Path) -> None:
    assert holder(tmp_path / "demo") == ""
    with claim(tmp_path / "demo"):
        assert "process" in holder(tmp_path / "demo")
    assert holder(tmp_path / "demo") == ""
    with claim(tmp_path / "demo"):
        pass
