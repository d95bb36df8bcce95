"""The parent's end of a process that runs a user's code: its start, its pipes, its prints, its end.

Questions are pickled, answers are lines of JSON: data written by the user's code is never unpickled. The caller sets
deadlines and interprets the lines. The child's end is `actors.processes.user_main`.
"""

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from actors.identity import ChildPrints, ended
from actors.processes.modules import folders

_MAIN = Path(__file__).with_name("user_main.py")
_log = logging.getLogger(__name__)
_LINE_BYTES = 1 << 28  # limit of an answer


def framed(question: object) -> bytes:
    """Return a question in the format that the child reads."""
    packed = pickle.dumps(question, protocol=pickle.HIGHEST_PROTOCOL)
    return len(packed).to_bytes(8, "little") + packed


class UserProcess:
    """`script`: the module whose `main(parent, setup)` serves. For one thread; any thread may call `wait`. Only `wait`,
    `how_it_ended` and `close` block."""

    def __init__(self, script: Path, setup: Mapping[str, Any]) -> None:
        self.prints = ChildPrints()
        self.received = bytearray()  # of an unfinished line
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_MAIN), str(script), json.dumps({**setup, "path": folders()})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.prints.writer,
                start_new_session=True,  # Ctrl-C at the terminal is for the run, which then closes its children
            )
        finally:
            self.prints.started()
        _log.info("%s is process %d", script.name, self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.questions: IO[bytes] = self._process.stdin
        self.answers = self._process.stdout.fileno()
        self._closed = False

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def detach(self) -> None:
        """Leave the closing of `questions` to the caller."""
        self._process.stdin = None

    def read(self) -> bool:
        """Read available answers; call it when there are some. False: the answers have ended, or are too long."""
        part = os.read(self.answers, 65536)
        self.received += part
        return bool(part) and len(self.received) <= _LINE_BYTES

    def line(self) -> bytes | None:
        """Return the next complete line, or None."""
        end = self.received.find(b"\n") + 1
        if not end:
            return None
        line = bytes(self.received[:end])
        del self.received[:end]
        return line

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, also to the processes it has started. Idempotent; `close` must still follow."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads its session

    def how_it_ended(self, timeout_s: float) -> str:
        """Describe how it ended, for messages, after its answers have ended; waits up to `timeout_s` for its exit
        status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return ended(self._process.poll())

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.wait()

    def close(self) -> None:
        """Kill it and close its pipes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        self.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unsent bytes of a question to a dead child
                if stream is not None:
                    stream.close()
        self.prints.close()
