"""now.json: what the run is doing at this moment. Replaced whole; may be missing."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "now.json"


@dataclass(frozen=True, slots=True)
class Now:
    """The run at one moment. `done` of `total` units of the phase, e.g. finished rollouts; total 0: not counted."""

    phase: str
    done: int
    total: int
    step: int  # last complete RL step
    at_s: float  # Unix time


def write(run_dir: Path, now: Now) -> None:
    """Write the file. A full disk costs the file, never the run. Not flushed to the disk: readers are on
    this system."""
    draft = run_dir / f".{FILE_NAME}.{os.getpid()}.tmp"
    try:
        draft.write_text(json.dumps(asdict(now)) + "\n", encoding="utf-8")
        draft.replace(run_dir / FILE_NAME)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def read(run_dir: Path) -> Now | None:
    try:
        return Now(**json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None
