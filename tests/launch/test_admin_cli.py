"""`paceline status`, `drain`, `pause`, `resume` and `threshold`, against a real coordinator."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from config.coordinator import CoordinatorOptions
from coordinator.service import CoordinatorService
from coordinator.status import Change, SessionStatus, Status, WorkerStatus
from launch.commands.admin import change_line, find_address, rendered
from launch.commands.cli import app
from launch.errors import PacelineError
from tests.coordinator.cluster import eventually, train_command, worker

ROOT = Path(__file__).parents[2]
OPTIONS = CoordinatorOptions(heartbeat_s=0.1, lease_s=20, start_deadline_s=60, stop_deadline_s=10)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CoordinatorService]:
    with CoordinatorService(OPTIONS, directory=tmp_path / "run") as service:
        yield service


@pytest.fixture
def folder(service: CoordinatorService, tmp_path: Path) -> str:
    return str(tmp_path / "run")


def test_status_drain_pause_and_threshold(service: CoordinatorService, folder: str) -> None:
    with worker(service.endpoint, "rollout-0", OPTIONS) as client:
        eventually(lambda: client.connected)
        service.rollout_started(7)
        client.idle()
        train = train_command(client)
        client.started(train.session, train.epoch, "h:1")
        eventually(lambda: service.status().workers[0].phase == "running")
        code, out, err = run("status", folder)
        assert (code, err) == (0, "")
        assert "RL step 7, idle workers may train; 1 of 1 workers train; threshold 1" in out
        assert re.search(r"rollout-0\s+TRAINING\s+[\d.]+ s\s+\d+\s+micro-step 0\s+g\s+n0\s+leads", out)

        code, out, _ = run("drain", folder, "--worker", "rollout-0", "--reason", "maintenance")
        assert code == 0
        assert re.search(r"rollout-0\s+TRAINING \(stopping\).*drained", out)
        (stop,) = client.poll(20)
        client.stopped(train.session)
        eventually(lambda: service.status().workers[0].state == "IDLE")

        code, out, _ = run("pause", folder, "--json")
        assert code == 0
        status = json.loads(out)
        assert status["paused"] is True
        assert status["workers"][0]["drained"] is True
        at = "--address", service.address.admin
        assert "spot training is paused" in run("status", *at, "--credentials", folder)[1]
        assert "requires its token: none was given" in run("status", *at)[2]
        assert run("drain", folder, "--worker", "rollout-0", "--undo")[0] == 0
        assert client.poll(0.05) == []
        assert "threshold 3" in run("threshold", "3", folder)[1]
        assert run("resume", folder)[0] == 0
        assert client.poll(0.05) == []
        assert run("threshold", "1", folder)[0] == 0
        assert train_command(client).session > train.session
    assert stop.session == train.session
    assert "drained nodes: n9" in run("drain", folder, "--node", "n9")[1]
    assert "no workers registered" in run("status", folder)[1]


def test_what_the_coordinator_refuses_is_shown_with_its_reason(service: CoordinatorService, folder: str) -> None:
    code, out, err = run("drain", folder, "--worker", "rollout-9")
    assert (code, out) == (1, "")
    assert "there is no worker 'rollout-9'; registered: none" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["drain", "--address", "127.0.0.1:1"], "--worker or --node"),
        (["drain", "--worker", "w", "--node", "n"], "--worker or --node"),
        (["status", ".", "--address", "127.0.0.1:1"], "RUN or --address"),
        (["threshold", "0"], "greater than or equal to 1"),
    ],
)
def test_usage_errors(arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_watch_follows(service: CoordinatorService, folder: str) -> None:
    """Into a pipe: a table, then a line per change, until the coordinator ends."""
    command = [sys.executable, "-m", "launch", "status", folder, "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert "no RL step yet" in process.stdout.readline()
        with worker(service.endpoint, "w0", OPTIONS) as client:
            eventually(lambda: client.connected)
            client.idle()
            eventually(lambda: service.status().workers[0].state == "IDLE")
        eventually(lambda: not service.status().workers)
        service.close()
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 1
    assert "no coordinator answers" in err
    nobody, new, idle, gone = out.splitlines()
    assert nobody.strip() == "no workers registered"
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}  w0: new -> BUSY \(registered\)", new)
    assert idle.endswith("w0: BUSY -> IDLE (out of work)")
    assert gone.endswith("w0: IDLE -> gone (said goodbye)")


def test_a_run_that_has_ended(service: CoordinatorService, folder: str) -> None:
    service.close()
    code, _, err = run("status", folder)
    assert code == 1
    assert "no coordinator answers at 127.0.0.1:" in err
    assert f"written by process {os.getpid()}" in err
    assert "Traceback" not in err


def test_the_token_is_found_in_the_folder_and_a_wrong_one_is_one_clear_line(tmp_path: Path) -> None:
    guarded = OPTIONS.model_copy(update={"admin": OPTIONS.admin.model_copy(update={"token": True})})
    copied = tmp_path / "copied"
    copied.mkdir()
    with CoordinatorService(guarded, directory=tmp_path / "run") as service:
        at = ("--address", service.address.admin)
        assert run("status", str(tmp_path / "run"))[0] == 0
        for credentials, says in (((), "none was given"), (("--credentials", str(copied)), "does not match")):
            (copied / "admin-token").write_text("wrong\n", encoding="utf-8")
            code, _, err = run("pause", *at, *credentials)
            assert code == 1
            assert "requires its token" in err.replace("\n", " ")
            assert says in err.replace("\n", " ")
            assert "Traceback" not in err
        (copied / "admin-token").write_bytes((tmp_path / "run" / "admin-token").read_bytes())
        assert run("pause", *at, "--credentials", str(copied))[0] == 0
        assert service.status().paused
        assert run("pause", "--credentials", str(copied))[0] == 2


def test_the_newest_run_is_found(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="has a coordinator"):
        find_address(None, tmp_path)
    with pytest.raises(PacelineError, match="no coordinator yet, or needs none"):
        find_address(tmp_path, tmp_path)
    for name, age_s in (("a", 10), ("b", 0), ("c", 20)):
        with CoordinatorService(OPTIONS, directory=tmp_path / name) as service:
            pass
        path = tmp_path / name / "coordinator.json"
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))
        if name == "b":
            newest = service.address.admin
    found, source, _ = find_address(None, tmp_path)
    assert found == newest
    assert str(tmp_path / "b") in source


def words(text: str) -> list[str]:
    return text.split()


def test_what_is_shown_in_words() -> None:
    idle = WorkerStatus(
        name="w0",
        incarnation=1,
        node="n0",
        group="g",
        state="IDLE",
        phase="",
        session=0,
        running=0,
        step=0,
        in_state_s=75,
        silent_s=0.1,
        drained=True,
        rests_s=12.3,
        trainer_failures=2,
    )
    busy = WorkerStatus(
        name="w1",
        incarnation=1,
        node="n0",
        group="g",
        state="BUSY",
        phase="",
        session=0,
        running=31,
        step=0,
        in_state_s=7200,
        silent_s=0.1,
        drained=False,
        rests_s=0,
        trainer_failures=0,
    )
    sessions = (SessionStatus("g", 4, 9, ("w9",)),)
    status = Status(
        term=2,
        epoch=9,
        uptime_s=30.0,
        endpoint="tcp://h:1",
        rollout_step=4,
        rolling=False,
        paused=False,
        settling=True,
        threshold=2,
        workers=(busy, idle),
        sessions=sessions,
        drained_nodes=(),
        counts={},
    )
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(rendered(status))
    first, _, above, below = console.export_text().splitlines()
    console.file.close()
    assert first.startswith("RL step 4, restarted, waiting for workers to register; 0 of 2 workers train")
    assert words(above) == words("w0 IDLE 1 min g n0 drained, pauses 12 s, 2 trainer failures")
    assert words(below) == words("w1 BUSY 2.0 h 31 requests g n0")
    change = Change(at_s=0.0, group="g", session=4, epoch=9, members=("w0", "w1"))
    assert change_line(change).endswith("session 4 of g, epoch 9: w0, w1")
    assert change_line(Change(at_s=0.0, group="g", session=4, epoch=10)).endswith("session 4 of g, epoch 10: ended")
