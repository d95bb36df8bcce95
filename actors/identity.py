"""An actor's visible identity: its name in `ray list actors`, and the destination of its lines. Independent of Ray.

An actor's lines are its log records and its child processes' stderr. They go to its own stderr, which Ray's dashboard
shows, and to a file in the run's folder, if its node can reach that. A child's output per call is bounded
(`ChildPrints`), so that endless prints of user code cannot fill the disk.
"""

import logging
import os
import signal
import socket
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from actors.stacks import STDERR, stacks_on_signal

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGES = ("actors", "config", "contracts", "coordinator", "drafter", "launch", "models", "planner", "policies")
PRINTS_BYTES = 1 << 16  # limit of user code's output per call
_PIPE_BYTES = 1 << 16  # capacity of a pipe on Linux
_ABOVE = __name__.removesuffix("actors.identity")  # "paceline." if installed from a wheel
_log = logging.getLogger(__name__)
_given: Counter[str] = Counter()
_file: TextIO | None = None


def unique_name(name: str) -> str:
    """Return `name` the first time, then `name.2`, `name.3`: Ray refuses a name until its last holder is gone."""
    _given[name] += 1
    return name if _given[name] == 1 else f"{name}.{_given[name]}"


def log_to(path: str | None, name: str) -> None:
    """Also append this process's lines to the file `path`, on SIGUSR1 its stacks; None: do nothing.

    If the file cannot be written, the actor continues without it."""
    global _file
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        _file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the process
    except OSError as error:
        print(f"{name}: no log file: {error}", file=sys.stderr)
    else:
        sys.stderr = _Tee(sys.stderr, _file)
    stacks_on_signal(STDERR if _file is None else _file.fileno())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger().addHandler(handler)
    for package in _PACKAGES:
        logging.getLogger(f"{_ABOVE}{package}").setLevel(logging.INFO)
    _log.info("%s is process %d on %s", name, os.getpid(), socket.gethostname())


class ChildPrints:
    """Copies a user-code child's stderr to this actor's lines, at most PRINTS_BYTES per call.

    Pass `writer` to the child as its stderr, then call `started`. Never blocks.
    """

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._room, self._left_out = PRINTS_BYTES, 0

    def started(self) -> None:
        """Close this process's copy of `writer`; the child has its own."""
        os.close(self.writer)

    def take(self) -> bool:
        """Copy available output, at most one pipe's capacity; return False once no writer is left."""
        try:
            part = os.read(self.reader, _PIPE_BYTES)
        except BlockingIOError:
            return True
        kept = part[: self._room]
        self._room -= len(kept)
        self._left_out += len(part) - len(kept)
        _write(kept)
        return bool(part)

    def renew(self) -> None:
        """Finish a call: copy the rest, report the omitted bytes, and reset the count."""
        for _ in range(2):  # a pipe's capacity, unless the child prints on
            if not self.take():
                break
        if self._left_out:
            _write(f"... {self._left_out} bytes left out: only {PRINTS_BYTES} bytes of a call are kept\n".encode())
        self._room, self._left_out = PRINTS_BYTES, 0

    def close(self) -> None:
        """Copy the rest and close; the child has ended."""
        self.renew()
        os.close(self.reader)


def _write(text: bytes) -> None:
    with suppress(OSError):  # a full disk loses lines but does not fail the call
        while text:
            text = text[os.write(2 if _file is None else _file.fileno(), text) :]


def ended(status: int | None) -> str:
    """Return how a child process ended, by its exit status; None: it is still running."""
    if status is None:
        return "it closed the descriptor of its answers"
    try:
        return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class _Tee:
    """A text stream copied to a file, without Ray's own lines (`:actor_name:...`)."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream, self._copy = stream, copy
        self._line_end_is_rays = False

    def write(self, text: str) -> int:
        rays = text.startswith((":actor_name:", ":job_id:", ":task_name:"))
        if not rays and not (self._line_end_is_rays and text == "\n"):
            with suppress(OSError, ValueError):  # a full disk, or a file closed at exit
                self._copy.write(text)
        self._line_end_is_rays = rays and not text.endswith("\n")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
