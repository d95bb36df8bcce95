"""The parent's end of a process that runs a user's code: its start, its pipes, what it prints, its end.

Questions are pickled, answers are lines of JSON: nothing that the user's code can write is ever unpickled. Deadlines
and what a line means are the caller's. The child's end is `actors.processes.user_main`.
"""

import contextlib
import json
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
_LINE_BYTES = 1 << 28  # of an answer


def framed(question: object) -> bytes:
    """A question as the child reads it."""
    packed = pickle.dumps(question, protocol=pickle.HIGHEST_PROTOCOL)
    return len(packed).to_bytes(8, "little") + packed


class UserProcess:
    """`script`: the module whose `main(parent, setup)` serves. For one thread, but that any may wait for it. Nothing
    waits but `wait`, `how_it_ended` and `close`."""

    def __init__(self, script: Path, setup: Mapping[str, Any]) -> None:
        self.prints = ChildPrints()
        self.received = bytearray()  # of a line that has not ended
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.questions: IO[bytes] = self._process.stdin
        self.answers = self._process.stdout.fileno()
        self._closed = False

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def detach(self) -> None:
        """Somebody else closes `questions`."""
        self._process.stdin = None

    def read(self) -> bool:
        """Take in what it has answered; for when there is something. False: its answers have ended, or are none."""
        part = os.read(self.answers, 65536)
        self.received += part
        return bool(part) and len(self.received) <= _LINE_BYTES

    def line(self) -> bytes | None:
        """The next whole line that was read."""
        end = self.received.find(b"\n") + 1
        if not end:
            return None
        line = bytes(self.received[:end])
        del self.received[:end]
        return line

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, to what it has started too. Idempotent; `close` must still follow."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the leader of its session

    def how_it_ended(self, timeout_s: float) -> str:
        """For people, after its answers have ended; waits up to `timeout_s` for its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return ended(self._process.poll())

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()

    def close(self) -> None:
        """Kill it and let go of its pipes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        self.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unsent bytes of a question to a child that is dead
                if stream is not None:
                    stream.close()
        self.prints.close()
