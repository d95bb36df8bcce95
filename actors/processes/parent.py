"""The parent's end: a child's start, its messages, its stderr and its end. Independent of the child's computation.

It imports no torch, so that its supervisor stays small and responsive while the child computes. The child ends with its
parent, whatever happens to the parent (`actors.processes.child`).
"""

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from actors.processes.link import Close, Link

STDERR_LINES = 50
_log = logging.getLogger(__name__)
_REPOSITORY = Path(__file__).resolve().parents[len(__name__.split(".")) - 1]  # root of the imports


class ChildProcess:
    """A process that runs `module.main()`, which uses `parent_link`. Thread-safe; one thread should call `poll` and
    `first`.

    Once it has ended, `died` is raised, with exit code or signal and the last lines of stderr."""

    def __init__(
        self, module: str, start: object, name: str, *, died: type[Exception], environment: dict[str, str]
    ) -> None:
        """Start it and send `start`. `environment`: variables in addition to this process's own."""
        self.name = name
        self._died = died
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None: the socket is closed
        self._ended = False
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_LINES)
        path = os.pathsep.join([str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {module} import main; main()", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=dict(os.environ) | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | environment,
                text=True,
                errors="replace",
            )
        _log.info("%s of %s is process %d", module, name, self.pid)
        self._link = Link(Connection(ours.detach()))
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{target.__name__}", daemon=True)
            for target in (self._read_stderr, self._read_messages)
        ]
        for thread in self._threads:
            thread.start()
        with suppress(OSError):  # if the child died already, `first` raises the reason
            self._link.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        """Send a message. Its arrays are copied and may be reused afterwards."""
        try:
            self._link.send(message)
        except OSError:
            raise self._died(self._how_it_ended()) from None

    def first(self, timeout_s: float) -> Any:
        """Return the child's first message. Raises TimeoutError or `died`."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(
                f"{self.name} (process {self.pid}) was not ready within {timeout_s:g} s{self._tail()}"
            ) from None
        if message is None:
            self._ended = True
            raise self._died(self._how_it_ended())
        return message

    def poll(self, timeout_s: float) -> list[Any]:
        """Return messages since the last call, waiting up to timeout_s for the first. Raises `died` after the last."""
        messages: list[Any] = []
        deadline_s = time.monotonic() + timeout_s
        while not self._ended:
            try:
                wait_s = 0.0 if messages else max(0.0, deadline_s - time.monotonic())
                message = self._messages.get(timeout=wait_s) if wait_s else self._messages.get_nowait()
            except queue.Empty:
                break
            if message is None:
                self._ended = True
            else:
                messages.append(message)
        if self._ended and not messages:
            raise self._died(self._how_it_ended())
        return messages

    def kill(self) -> None:
        """Send SIGKILL, at once. Idempotent; `close` must still follow."""
        self._process.kill()

    def close(self, timeout_s: float) -> None:
        """Send Close, wait, and kill it after `timeout_s` (0: at once). Idempotent."""
        if timeout_s > 0:
            with suppress(OSError):
                self._link.send(Close())
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)
        for thread in self._threads:
            thread.join(2.0)
        self._link.close()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _read_messages(self) -> None:
        try:
            while True:
                self._messages.put(self._link.receive())
        except (EOFError, OSError):
            self._messages.put(None)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with suppress(ValueError):  # closed while reading
            for line in self._process.stderr:
                self._stderr_tail.append(line.rstrip("\n"))
                print(f"[{self.name}] {line}", end="", file=sys.stderr, flush=True)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return f"{self.name} (process {self.pid}) closed its pipe but still runs{self._tail()}"
        self._threads[0].join(1.0)
        how = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                how = f"signal {signal.Signals(-code).name}"
        return f"{self.name} (process {self.pid}) ended with {how}{self._tail()}"

    def _tail(self) -> str:
        tail = "\n".join(self._stderr_tail)
        return f"; its last lines on stderr:\n{tail}" if tail else ""
