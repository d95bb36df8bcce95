"""Who an actor is to people: its name in `ray list actors`, and where its lines go. Knows nothing of Ray.

An actor's lines are its log records and what its child processes write to stderr. They go to its own stderr, which
Ray's dashboard shows, and to a file in the run's folder, if that can be reached from its node.
"""

import logging
import os
import socket
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGES = ("actors", "coordinator", "drafter", "launch", "models", "policies")
_ABOVE = __name__.removesuffix("actors.identity")  # "paceline." where it was installed from a wheel
_log = logging.getLogger(__name__)
_given: Counter[str] = Counter()
_file: TextIO | None = None


def unique_name(name: str) -> str:
    """`name` the first time, then `name.2`, `name.3`: Ray refuses a name until its last bearer is really gone."""
    _given[name] += 1
    return name if _given[name] == 1 else f"{name}.{_given[name]}"


def log_to(path: str | None, name: str) -> None:
    """From now on, this process's lines go to the file `path` too, after those of an earlier process. None: nothing
    changes. A file that cannot be written costs the file, never the actor."""
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
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger().addHandler(handler)
    for package in _PACKAGES:
        logging.getLogger(f"{_ABOVE}{package}").setLevel(logging.INFO)
    _log.info("%s is process %d on %s", name, os.getpid(), socket.gethostname())


def child_stderr() -> int | None:
    """For the stderr of a child process that nobody reads: the log file; None (inherit) where there is none."""
    return None if _file is None else _file.fileno()


class _Tee:
    """A text stream and a copy of it in a file, without the lines that Ray writes for itself (`:actor_name:...`)."""

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
