"""The child's end of a process that runs a user's code (`actors.processes.user_code`): its pipes. It is run by path,
with the path of the module whose `main` serves, and imports nothing of Paceline, so that it starts fast.

Questions arrive on stdin (8 bytes of length, then a pickle), answers go to stdout as JSON lines. Both are moved out of
the user's reach before any user code runs: descriptor 0 is then /dev/null, 1 is the log, and programs started by the
user inherit neither pipe. A process forked by the user's code never answers.
"""

import faulthandler
import importlib.util
import json
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Parent:
    """The parent's questions, and the answers to it."""

    def __init__(self, path: list[str]) -> None:
        """`path`: module search path from now on."""
        self._questions = os.fdopen(os.dup(0), "rb")  # programs started by the user do not inherit this descriptor
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._answers = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # prints of the user's code go to the log, not into the answers
        sys.stdout = sys.stderr  # line-buffered: this process ends by SIGKILL, which loses buffered output
        sys.path[:] = path
        self._owner = os.getpid()

    def questions(self) -> Iterator[Any]:
        """Yield questions until the parent closes its end."""
        while header := self._questions.read(8):
            yield pickle.loads(self._questions.read(int.from_bytes(header, "little")))

    def answer(self, said: dict[str, Any]) -> None:
        if os.getpid() != self._owner:
            os._exit(0)  # the user's code forked, and returned here twice
        self._answers.write(json.dumps(said).encode() + b"\n")

    def forked(self) -> None:
        """Let this process answer from now on: our own code forked it."""
        self._owner = os.getpid()


def beside(script: str, name: str) -> Any:
    """Load the module `name` in the folder of `script`, without its package, which imports much."""
    path = Path(script).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"paceline_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    script, setup = sys.argv[1], json.loads(sys.argv[2])
    faulthandler.register(signal.SIGUSR1, 2)  # as actors.stacks
    module = beside(script, Path(script).stem)  # before the user's folders are searched: they may shadow a module
    module.main(Parent(setup["path"]), setup)


if __name__ == "__main__":
    main()
