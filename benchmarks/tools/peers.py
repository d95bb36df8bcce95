"""Contestants in separate processes, called over pipes: one JSON case per line in, one JSON answer per line out.

Owns both ends of the pipe, not the cases. For contestants that cannot share a process: another interpreter, or an
engine with global state.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT


def serve(make: Callable[[], tuple[Any, Callable[..., Any]]]) -> None:
    """Run the contestant's process. `make` returns its first message, and the function that answers a
    case's keywords."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Output of libraries must not disturb the answers.
    hello, answer = make()
    print(json.dumps(hello), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers)


class Peer:
    """A contestant's process, seen from the benchmark. Exits with SystemExit if the process ends."""

    def __init__(self, name: str, words: Sequence[str], log: Path, threads: int, **environment: str) -> None:
        self.name, self._log = name, log
        given = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | environment
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                words,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | given,
            )

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: see {self._log}")
        return json.loads(line)

    def ask(self, case: Mapping[str, Any]) -> Any:
        """Return its answer; times are from its own clock."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `answer` reports
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """Let it end, as it does at the end of its input; kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
