"""A child process that computes one call at a time and is killed at its deadline. Owns the deadline and the restart;
`actors.processes.user_code` owns the process and its pipes.

What a child computes depends only on its argument. So a child that ends, or answers another question, is replaced and
asked once more. An answer and a deadline are final.

A deadline kept by signals works only in the main thread. Neither signals nor threads stop a regular expression or a
power of big integers that never returns to the interpreter. Killing a process always works.
"""

import json
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

from actors.identity import ended
from actors.processes.user_code import UserProcess, framed
from contracts.rewards import GradingError

_SCRIPT = Path(__file__).with_name("child_main.py")
_FORK_TIMEOUT_S = 5.0  # after a longer fork the whole child is restarted
_START_TIMEOUT_S = 120.0  # imports of sympy or of the user's module on a busy machine
_END_TIMEOUT_S = 5.0  # from the end of a child's answers to its exit status


class ChildTimeoutError(Exception):
    """The call missed its deadline; the child was killed."""


class ChildDiedError(GradingError):
    """The child ended during the call (out of memory, stack overflow), or answered another question."""


class DeadlineChild:
    """A child process of one of child_main.py's kinds; started on first use, thread-safe.

    `forks`: a fork of the child computes. Killing it costs milliseconds, since the child stays, with all its imports,
    and forks again. For kinds without state between calls.
    """

    def __init__(self, kind: str, argument: str = "", *, memory_mb: int | None = None, forks: bool = False) -> None:
        self._kind, self._argument, self._memory_mb, self._forks = kind, argument, memory_mb, forks
        self._lock = threading.Lock()
        self._process: UserProcess | None = None
        self._number = 0  # of the last question; with 0 a process reports ready

    def start(self) -> None:
        """Start the child now. GradingError with the child's reason if it cannot start, as after a failed import."""
        with self._lock:
            self._ensure()

    def call(self, argument: Any, *, timeout_s: float) -> Any:
        """Return the child's answer to a picklable argument. ChildTimeoutError after `timeout_s`, GradingError if the
        child raised.

        The time of a start does not count.
        """
        with self._lock:
            try:
                return self._ask(argument, timeout_s)
            except ChildDiedError:
                if self._forks:  # a fork may run out of memory again
                    raise
                return self._ask(argument, timeout_s)

    def _ask(self, argument: Any, timeout_s: float) -> Any:
        process = self._ensure()
        self._number += 1
        try:
            process.questions.write(framed((self._number, timeout_s, argument)))
            process.questions.flush()
        except OSError as error:
            raise self._died(process) from error
        return self._receive(process, self._number, timeout_s)

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _ensure(self) -> UserProcess:
        if self._process is None or not self._process.runs:
            self._kill()
            setup = {
                "kind": self._kind,
                "argument": self._argument,
                "memory_mb": self._memory_mb,
                "forks": self._forks,
            }
            self._process = UserProcess(_SCRIPT, setup)
            try:
                self._receive(self._process, 0, _START_TIMEOUT_S)
            except ChildTimeoutError as error:
                raise GradingError(f"the {self._kind} child did not start within {_START_TIMEOUT_S:g} s") from error
        return self._process

    def _receive(self, process: UserProcess, number: int, timeout_s: float) -> Any:
        """Return the answer to question `number`."""
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

    def _died(self, process: UserProcess) -> ChildDiedError:
        """Return the error of a process whose answers have ended: read its exit status, then kill it."""
        end = process.how_it_ended(_END_TIMEOUT_S)
        self._kill()
        return ChildDiedError(f"the {self._kind} child process died ({end})")

    def _stop_call(self, process: UserProcess) -> None:
        """End the computation: the child, or only its fork, whose successor is ready on return."""
        if not self._forks or not process.runs:
            self._kill()
            return
        process.signal(signal.SIGUSR2)
        deadline = time.monotonic() + _FORK_TIMEOUT_S
        while line := self._line(process, deadline):
            if "forked" in _parsed(line):
                return
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _line(self, process: UserProcess, deadline: float) -> bytes | None:
        """Return the next line of the answers, b"" at their end, None at the deadline. Copies prints meanwhile."""
        prints, poll = process.prints, select.poll()
        poll.register(process.answers, select.POLLIN)
        poll.register(prints.reader, select.POLLIN)
        try:
            while (line := process.line()) is None:
                ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
                if prints.reader in ready and not prints.take():
                    poll.unregister(prints.reader)
                if process.answers in ready:
                    if not process.read():
                        return b""
                elif time.monotonic() >= deadline:
                    return None
        finally:
            prints.renew()
        return line


def _parsed(line: bytes) -> dict[str, Any]:
    """Return a line's JSON object; {} if it is none."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
