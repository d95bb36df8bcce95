"""A process that runs a user's code: its pipes, whatever that code does with them."""

import gc
import json
import select
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.processes.user_code import UserProcess, framed

SERVES = """
import os, sys

def main(parent, setup):
    parent.answer({"setup": setup["greeting"], "stdin": sys.stdin.read(), "link": os.readlink("/proc/self/fd/0")})
    for question in parent.questions():
        if question == "fork" and os.fork() == 0:
            parent.answer({"twice": True})  # a process that the user's code made says nothing
        parent.answer({"heard": question})
"""
FORGES = """
import os, pickle

class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)

def main(parent, setup):
    os.chdir(setup["folder"])
    parent._answers.write(pickle.dumps(Trap()) + b"\\n")
"""


def line_of(process: UserProcess) -> bytes:
    """The next one; b"" at the end."""
    while (line := process.line()) is None:
        ready, _, _ = select.select([process.answers], [], [], 60.0)
        assert ready, "nothing came within 60 s"
        if not process.read():
            return b""
    return line


def started(tmp_path: Path, script: str, **setup: Any) -> UserProcess:
    path = tmp_path / "serves.py"
    path.write_text(script)
    return UserProcess(path, setup)


def test_questions_are_answered_and_user_code_gets_neither_pipe(tmp_path: Path) -> None:
    gc.collect()
    before = psutil.Process().num_fds()
    process = started(tmp_path, SERVES, greeting="hello")
    assert json.loads(line_of(process)) == {"setup": "hello", "stdin": "", "link": "/dev/null"}
    for question in ("one", "fork", "two"):
        process.questions.write(framed(question))
        process.questions.flush()
        assert json.loads(line_of(process)) == {"heard": question}
    process.kill()
    assert line_of(process) == b""
    assert process.how_it_ended(60.0) == "killed by SIGKILL"
    process.close()
    process.close()
    assert not process.runs
    assert psutil.Process().num_fds() <= before


def test_what_user_code_writes_is_never_unpickled(tmp_path: Path) -> None:
    """It comes as bytes, which are no JSON."""
    process = started(tmp_path, FORGES, folder=str(tmp_path))
    with pytest.raises(ValueError, match=r"."):
        json.loads(line_of(process))
    process.close()
    assert not (tmp_path / "sprung").exists()
    assert not Path("sprung").exists()
