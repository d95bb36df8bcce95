"""The watch over Ray's servers, with servers and processes of the test's own; and what a dead driver's head leaves."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue

import pytest

from launch.cluster.processes import MARK, end_processes, mark, sessions_of_their_own, sweep
from launch.cluster.watch import LEAST_FAILURES, RayWatch

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")


class Server:
    """Answers what it is told to, and lets the clock run by a second for every question."""

    def __init__(self, answers: str) -> None:
        self._left = list(answers)
        self.asked = threading.Event()  # every answer was given
        self.now_s = 0.0

    def __call__(self, address: str, timeout_s: float) -> bool:
        self.now_s += 1.0
        if len(self._left) == 1:
            self.asked.set()
        return (self._left.pop(0) if len(self._left) > 1 else self._left[0]) == "+"


@contextmanager
def watched(
    server: Callable[[str, float], bool], clock: Callable[[], float] = lambda: 0.0, timeout_s: float = 5.0, **pids: int
) -> Iterator[tuple[RayWatch, "SimpleQueue[str]"]]:
    told: SimpleQueue[str] = SimpleQueue()
    watch = RayWatch({"the GCS": "h:1"}, pids, timeout_s, told.put, answers=server, period_s=0.0, clock=clock)
    with watch:
        yield watch, told
    assert told.empty()


@contextmanager
def sleeper(**options: object) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_server_that_is_silent_for_too_long_is_a_loss_and_told_once() -> None:
    server = Server("++" + "-" * 100)
    with watched(server, lambda: server.now_s, 5.0) as (_, told):
        assert told.get(timeout=20) == "the GCS at h:1 has not answered for 5 s (cluster.ray_timeout_s)"
        server.asked.wait(20)


def test_a_server_that_answers_again_was_never_lost() -> None:
    server = Server("+----+----+----+")
    with watched(server, lambda: server.now_s, 5.0):
        assert server.asked.wait(20)


def test_one_late_answer_is_no_loss_however_late() -> None:
    """This process was stopped, or its machine slept, while it asked."""
    server = Server("+" + "-" * (LEAST_FAILURES - 1) + "+")
    with watched(server, lambda: 1000 * server.now_s, 5.0):
        assert server.asked.wait(20)


def test_a_server_that_never_answered_is_not_watched() -> None:
    """It wants TLS, or is not what we think."""
    server = Server("-" * 50)
    with watched(server, lambda: server.now_s, 5.0):
        assert server.asked.wait(20)


def test_a_failure_beside_a_silent_server_waits_until_it_is_known_whose_it_is() -> None:
    """Ray's calls fail in their own ways before a loss is certain."""
    server, asking = Server("+"), threading.Event()

    def answers(address: str, timeout_s: float) -> bool:
        asking.set()
        return server(address, timeout_s)

    with watched(answers) as (watch, _):
        assert server.asked.wait(20)
        watch.settle()  # all answer: the failure is its own
        server._left = ["-"]
        waiting = threading.Thread(target=watch.settle, daemon=True)
        waiting.start()
        for _ in range(3):
            asking.clear()
            assert asking.wait(20)
        assert waiting.is_alive()
        server._left = ["+"]
        waiting.join(20)
        assert not waiting.is_alive()


def test_a_process_that_ends_is_a_loss_at_once() -> None:
    with sleeper() as process, watched(Server("+"), raylet=process.pid) as (_, told):
        process.kill()
        assert told.get(timeout=20) == f"raylet (process {process.pid}) has ended"


def test_a_process_that_ends_while_ray_is_being_ended_is_none() -> None:
    with sleeper() as process, watched(Server("+"), raylet=process.pid) as (watch, _):
        watch.closing()
        process.kill()
        process.wait(20)


@pytest.fixture
def session(tmp_path: Path) -> Path:
    folder = tmp_path / "session_1"
    (folder / "logs").mkdir(parents=True)
    return folder


def test_what_a_dead_drivers_head_left_is_ended_and_nothing_else(session: Path) -> None:
    session.with_name("session_latest").symlink_to(session)
    other = session.with_name("session_12")  # its path begins with the other's
    (other / "logs").mkdir(parents=True)
    with (
        (session / "logs/agent.log").open("w") as log,
        (other / "logs/agent.log").open("w") as others_log,
        sleeper(stderr=log) as left,
        sleeper(stderr=others_log) as others,
        (session / "logs/agent.log").open() as seen,
        sleeper(stderr=seen) as reader,
    ):
        log.close()
        mark(session)  # by this process, which lives
        assert sweep(session.parent) == 0
        with sleeper() as driver:
            (session / MARK).write_text(f"{driver.pid} 1\n")  # the process id was used again
        assert sweep(session.parent) == 1
        assert left.wait(20) == -9
        assert (others.poll(), reader.poll()) == (None, None)
        assert not (session / MARK).exists()
        assert sweep(session.parent) == 0


def test_this_process_does_not_end_itself(session: Path) -> None:
    with (session / "logs/driver.log").open("w"):
        assert end_processes(session) == 0


def test_what_is_left_ends_after_this_process_whose_exit_code_is_its_own(session: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from launch.cluster.processes import end_processes_afterwards\n"
        "end_processes_afterwards(Path(sys.argv[1]))\n"
        "time.sleep(0.5)\n"
        "os._exit(int(sys.stdin.readline()))\n"
    )
    with (session / "logs/raylet.out").open("w") as log, sleeper(stderr=log) as left:
        log.close()  # or this process would belong to it too
        command = [sys.executable, "-c", code, str(session)]
        driver = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            left.wait(2.0)
        driver.communicate("75\n", timeout=20)
        assert driver.returncode == 75
        assert left.wait(20) == -9


@pytest.mark.parametrize("inside", [True, False])
def test_what_a_thread_starts_as_ray_does_has_a_session_of_its_own_and_nothing_else_has(inside: bool) -> None:
    def session_of(**options: object) -> int:
        with sleeper(**options) as process:
            return os.getsid(process.pid)

    def started_elsewhere() -> None:
        found.append(session_of(preexec_fn=int))

    found: list[int] = []
    with sessions_of_their_own() if inside else nullcontext():
        assert (session_of(preexec_fn=int) == os.getsid(0)) is not inside
        other = threading.Thread(target=started_elsewhere)
        other.start()
        other.join()
    assert [*found, session_of(preexec_fn=int)] == [os.getsid(0)] * 2
