"""Run folders: set aside, never overwritten, and written by one process at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.errors import PacelineError
from launch.run_folder import claim, set_aside

HOLD = """
import sys
from pathlib import Path
from launch.run_folder import claim
with claim(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_an_older_folder_moves_to_the_first_free_name(tmp_path: Path) -> None:
    run, taken = tmp_path / "demo", tmp_path / "demo.1"
    assert set_aside(run) is None
    run.mkdir()
    taken.mkdir()
    assert set_aside(run) == tmp_path / "demo.2"
    assert not run.exists()


def test_a_run_in_use_names_its_process_and_is_free_after_sigkill(tmp_path: Path) -> None:
    run = tmp_path / "runs/demo"
    command = [sys.executable, "-c", HOLD, str(run)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(PacelineError, match=f"in use by process {holder.pid} ") as caught, claim(run):
            pass
        assert "run.name" in str(caught.value.remedy)
        with claim(tmp_path / "runs/other"):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(10)
        with claim(run), pytest.raises(PacelineError, match=f"process {os.getpid()} "), claim(run):
            pass
        with claim(run):
            pass
