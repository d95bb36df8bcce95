"""The folder of a run on disk. A new run never overwrites an older one of the same name, and no two write to one
folder.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.errors import PacelineError, UsageError

BEST_DIR = "best"  # in the run's folder: its best model (launch.run.best)
BEST_RECORD = "best.json"  # in BEST_DIR: {"step", "eval/..."}, of a low-bit run also {"evaluated_as", "weights"}


@contextmanager
def claim(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir` for this process, by a lock file beside it that the kernel releases however the process ends.

    Raises PacelineError if another process holds it.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    path = run_dir.with_name(f".{run_dir.name}.lock")
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise PacelineError(
                f"{run_dir} is in use by {file.read().strip() or 'another process'}",
                remedy="wait for that run or stop it; another run at the same time needs another run.name",
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def holder(run_dir: Path) -> str:
    """Return the holder: "process N on HOST"; empty if there is none."""
    try:
        with run_dir.with_name(f".{run_dir.name}.lock").open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "another process"
    except OSError:
        return ""
    return ""


def log_file(run_dir: Path, actor: str) -> str:
    """Return the path of the actor's log; its first writer makes the folder."""
    return str((run_dir / "logs" / f"{actor}.log").resolve())


def set_aside(run_dir: Path) -> Path | None:
    """Move an existing run folder to the first free `<name>.N`. Returns its new path."""
    if not run_dir.exists():
        return None
    number = 1
    while (target := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(target)
    return target


def best_model(run: Path) -> Path:
    """Return the run's best model. Raises UsageError if the run kept none."""
    if not (run / BEST_DIR / BEST_RECORD).is_file():
        raise UsageError(
            f"no best model in {run}",
            remedy="a run keeps one with eval.every above 0, once an evaluation is better by "
            "checkpoint.best_metric than the one before training",
        )
    return run / BEST_DIR
