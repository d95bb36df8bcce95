"""SIGUSR1 shows where a process hangs, whatever kind of process it is, and the process goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import ray

from actors import identity
from actors.processes.parent import ChildProcess
from actors.processes.user_code import UserProcess
from actors.stacks import stacks_into
from benchmarks.alone import DispatcherAlone, spawner
from config.rollout import RolloutOptions
from launch.run_folder import log_file
from tests.actors.fake_engine import FakeEngine, FakeOptions


def eventually(found: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


HANGS = """
import sys
from pathlib import Path
from actors.stacks import stacks_into

def holds_the_gil():
    print("here", flush=True)
    sum(range(1 << 62))  # no other Python code of this process runs any more

with stacks_into(Path(sys.argv[1])):
    holds_the_gil()
"""


def test_a_thread_that_never_gives_the_gil_up_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("earlier\n")
    with subprocess.Popen([sys.executable, "-c", HANGS, str(log)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            for count in (1, 2):
                process.send_signal(signal.SIGUSR1)
                eventually(lambda count=count: log.read_text().count("in holds_the_gil") == count)
            assert process.poll() is None
            assert log.read_text().startswith("earlier\n")
        finally:
            process.kill()


def test_a_handler_of_the_users_own_stays(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with stacks_into(tmp_path / "run.log"):
            os.kill(os.getpid(), signal.SIGUSR1)
            eventually(lambda: received == [signal.SIGUSR1])
        assert not (tmp_path / "run.log").exists()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_behind_the_block_the_signal_is_as_before(tmp_path: Path) -> None:
    code = "import os, signal, sys; from pathlib import Path; from actors.stacks import stacks_into\n"
    code += "with stacks_into(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGUSR1)\n"
    code += "print('goes on', flush=True); os.kill(os.getpid(), signal.SIGUSR1); print('never')"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert (done.stdout, done.returncode) == ("goes on\n", -signal.SIGUSR1)
    assert "most recent call first" in (tmp_path / "log").read_text()


class Died(Exception):  # noqa: N818 - as the engine's
    pass


def test_a_child_shows_its_stacks_on_its_parents_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    child = ChildProcess("tests.processes.hanging_child", "start", "rollout-7", died=Died, environment={})
    try:
        assert child.first(60.0) == ["ready"]
        text = ""

        def shown() -> bool:
            nonlocal text
            os.kill(child.pid, signal.SIGUSR1)  # the first may come before it hangs
            text += capfd.readouterr().err
            return "in hangs_here" in text

        eventually(shown)
        assert re.search(r"^\[rollout-7\].* in hangs_here$", text, re.MULTILINE)
        assert child.poll(0.0) == []  # it lives
    finally:
        child.kill()
        child.close(0.0)


@pytest.mark.ray
def test_an_actor_shows_its_stacks_in_its_log(tmp_path: Path) -> None:
    spawn = spawner(lambda name: partial(FakeEngine, FakeOptions()), log=partial(log_file, tmp_path))
    with ExitStack() as stack:
        dispatcher = DispatcherAlone(spawn, RolloutOptions(workers=1))
        stack.callback(dispatcher.close)
        dispatcher.start()
        log = tmp_path / "logs" / "rollout-0.log"
        found = re.search(r"rollout-0 is process (\d+)", log.read_text())
        assert found is not None
        os.kill(int(found[1]), signal.SIGUSR1)
        eventually(lambda: "most recent call first" in log.read_text())
        [name] = [name for name in ray.util.list_named_actors() if name.startswith("rollout-0")]
        assert ray.get_actor(name) is not None


USERS = """
import time

def main(parent, setup):
    parent.answer({"ready": True})
    hangs_in_the_users_code()

def hangs_in_the_users_code():
    time.sleep(600)
"""


def test_user_code_that_hangs_is_shown_in_the_actors_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users.py").write_text(USERS)
    log = tmp_path / "reward-0.log"
    with log.open("a", encoding="utf-8") as file:
        monkeypatch.setattr(identity, "_file", file)
        process = UserProcess(tmp_path / "users.py", {})
        try:
            eventually(lambda: process.read() and process.line() is not None)

            def shown() -> bool:
                process.signal(signal.SIGUSR1)
                return process.prints.take() and "in hangs_in_the_users_code" in log.read_text()

            eventually(shown)
            assert process.runs
        finally:
            process.close()
