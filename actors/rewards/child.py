"""A child process that computes one thing at a time and is killed at its deadline. Owns the pipe, the deadline and the
restart. What a child computes is a function of its argument, so a child that ends, or answers another question than
the one it was asked, is replaced and asked once more; an answer and a deadline are final.

A deadline kept by signals works only in the main thread, and neither signals nor threads stop a regular expression or a
power of big integers that never returns to the interpreter. Killing a process always works.
"""

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from actors.identity import ChildPrints, ended
from actors.processes.modules import folders
from contracts.rewards import GradingError

_SCRIPT = Path(__file__).with_name("child_main.py")
_FORK_TIMEOUT_S = 5.0  # a fork that takes longer, and the whole child is started again
_START_TIMEOUT_S = 120.0  # imports of sympy or of the user's module on a busy machine
_END_TIMEOUT_S = 5.0  # from the end of a child's answers to its exit status


class ChildTimeoutError(Exception):
    """The call did not end before its deadline; the child was killed."""


class ChildDiedError(GradingError):
    """The child ended during the call (out of memory, stack overflow), or answered what it was not asked."""


class DeadlineChild:
    """One child process of a kind that child_main.py knows; started when first used, thread-safe.

    forks: what computes is a fork of the child. Killing it costs milliseconds, since the child, with all that it has
    imported, stays and forks the next. For kinds that keep no state between calls.
    """

    def __init__(self, kind: str, argument: str = "", *, memory_mb: int | None = None, forks: bool = False) -> None:
        self._kind, self._argument, self._memory_mb, self._forks = kind, argument, memory_mb, forks
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._prints: ChildPrints | None = None  # of the process
        self._received = bytearray()  # read from the child, of lines not yet looked at
        self._number = 0  # of the last question; a process says with 0 that it is ready

    def start(self) -> None:
        """Starts the child now; GradingError with the child's reason if it cannot (an import that fails, for one)."""
        with self._lock:
            self._ensure()

    def call(self, argument: Any, *, timeout_s: float) -> Any:
        """The child's answer to a picklable argument; ChildTimeoutError after `timeout_s`, GradingError if it raised.

        The time that a start takes does not count.
        """
        with self._lock:
            try:
                return self._ask(argument, timeout_s)
            except ChildDiedError:
                if self._forks:  # what computes in forks is what may run out of memory
                    raise
                return self._ask(argument, timeout_s)

    def _ask(self, argument: Any, timeout_s: float) -> Any:
        process = self._ensure()
        assert process.stdin is not None
        self._number += 1
        asked = (self._number, timeout_s, argument)
        request = pickle.dumps(asked, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            process.stdin.write(len(request).to_bytes(8, "little") + request)
            process.stdin.flush()
        except OSError as error:
            raise self._died(process) from error
        return self._receive(process, self._number, timeout_s)

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _ensure(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            setup = {
                "argument": self._argument,
                "memory_mb": self._memory_mb,
                "path": folders(),
                "forks": self._forks,
            }
            self._prints = ChildPrints()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_SCRIPT), self._kind, json.dumps(setup)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._prints.writer,
                    start_new_session=True,  # Ctrl-C at the terminal is for the run, which then closes its children
                )
            finally:
                self._prints.started()
            try:
                self._receive(self._process, 0, _START_TIMEOUT_S)
            except ChildTimeoutError as error:
                raise GradingError(f"the {self._kind} child did not start within {_START_TIMEOUT_S:g} s") from error
        return self._process

    def _receive(self, process: subprocess.Popen[bytes], number: int, timeout_s: float) -> Any:
        """The answer to question `number`."""
        line = self._line(process, time.monotonic() + timeout_s)
        if line is None:
            self._stop_call(process)
            raise ChildTimeoutError(f"no answer within {timeout_s:g} s")
        if not line:
            raise self._died(process)
        answer = _parsed(line)
        if self._forks and "forked" in answer:
            raise ChildDiedError(f"the {self._kind} child process died ({ended(answer['forked'])})")
        if answer.get("number") != number or not answer.keys() & {"value", "error"}:
            self._kill()
            raise ChildDiedError(
                f"the {self._kind} child process was killed: what it answered is not the answer to what it was asked "
                f"({line[:80]!r}); does something else write to the descriptor of its answers?"
            )
        if "error" in answer:
            raise GradingError(answer["error"], answer.get("trace"))
        return answer["value"]

    def _died(self, process: subprocess.Popen[bytes]) -> ChildDiedError:
        """Its answers have ended: how it did, before it is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)
        end = ended(process.poll())
        self._kill()
        return ChildDiedError(f"the {self._kind} child process died ({end})")

    def _stop_call(self, process: subprocess.Popen[bytes]) -> None:
        """End what computes: the child, or only its fork, whose successor is ready when this returns."""
        if not self._forks or process.poll() is not None:
            self._kill()
            return
        process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _FORK_TIMEOUT_S
        while line := self._line(process, deadline):
            if "forked" in _parsed(line):
                return
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the leader of its session, and what it has forked
            self._process.wait()
            self._received.clear()
            for stream in (self._process.stdin, self._process.stdout):
                try:
                    if stream is not None:
                        stream.close()
                except OSError:
                    pass  # unsent bytes of a request to a child that is dead
            self._process = None
        if self._prints is not None:
            self._prints.close()
            self._prints = None

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """The next line of its answers, b"" at their end, None at the deadline; what follows stays in `_received`.
        Copies what is printed meanwhile."""
        assert process.stdout is not None
        assert self._prints is not None
        answers, received, poll = process.stdout.fileno(), self._received, select.poll()
        poll.register(answers, select.POLLIN)
        poll.register(self._prints.reader, select.POLLIN)
        try:
            while (end := received.find(b"\n")) < 0:
                ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
                if self._prints.reader in ready and not self._prints.take():
                    poll.unregister(self._prints.reader)
                if answers in ready:
                    part = os.read(answers, 65536)
                    if not part:
                        return b""
                    received += part
                elif time.monotonic() >= deadline:
                    return None
        finally:
            self._prints.renew()
        line = bytes(received[: end + 1])
        del received[: end + 1]
        return line


def _parsed(line: bytes) -> dict[str, Any]:
    """What a line says; nothing, if it is no answer's."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
