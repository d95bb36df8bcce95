"""Whole-run checkpoints as directories that either exist completely or not at all: names, atomicity, pruning and
detection of damage. The contents belong to the callers (the learner's tensors, the driver's state).

Layout: `<root>/step_000010/{checksums.json, state.json, learner/...}` and the files that the writer puts beside
learner/. All of it is first written to a hidden directory, then sealed (models.durable), synced, and renamed. A crash
or a full disk at any moment leaves the previous checkpoints intact. Single writer.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.durable import CHECKSUMS_FILE, Fault, faults, room, seal, sync

STATE_FILE = "state.json"
LEARNER_DIR = "learner"
_COMPLETE = re.compile(r"step_(\d{6,})")
_TEMPORARY = ".writing-"
_REPLACED = ".replaced-"


class CheckpointError(RuntimeError):
    """The checkpoint was not written or cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of `check` for a usable checkpoint."""

    sealed: bool  # False: an earlier version wrote it, without checksums
    spare: tuple[Fault, ...] = ()  # damaged files that the run does not need


def checkpoint_path(root: str | Path, step: int) -> Path:
    return Path(root) / f"step_{step:06d}"


@contextmanager
def new_checkpoint(root: str | Path, step: int, state: Mapping[str, Any], keep: int) -> Iterator[Path]:
    """Write checkpoint `step` in the block; then remove all but the newest `keep` (at least 1).

    Yields an empty directory for the learner's files, which all ranks and this process see. With the end of the block
    it is part of `checkpoint_path`. `state` is the driver's, JSON. A checkpoint of the same step is replaced. Raises
    CheckpointError; errors of the block other than OSError are passed on. In both cases nothing of the new checkpoint
    remains.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep is {keep}: at least one is needed")
    final = checkpoint_path(root, step)
    root = final.parent
    temporary = root / f"{_TEMPORARY}{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        (temporary / LEARNER_DIR).mkdir(parents=True)
        yield temporary / LEARNER_DIR
        written = {"step": step, "checksums": CHECKSUMS_FILE, **state}
        (temporary / STATE_FILE).write_text(json.dumps(written, indent=1), encoding="utf-8")
        seal(temporary)
        _sync_tree(temporary)
        _rename(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_explain(root, step, error)) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in checkpoints(root)[:-keep]:
        with suppress(OSError):
            old = old.rename(old.with_name(f"{_REPLACED}{old.name}"))  # never half of one under its name
        shutil.rmtree(old, ignore_errors=True)


def checkpoints(root: str | Path) -> list[Path]:
    """Return complete checkpoints, lowest step first. Empty if there are none or no such directory."""
    root = Path(root)
    found: dict[int, Path] = {}
    for entry in root.iterdir() if root.is_dir() else ():
        match = _COMPLETE.fullmatch(entry.name)
        if match and ((entry / STATE_FILE).is_file() or (entry / CHECKSUMS_FILE).is_file()):
            found[int(match[1])] = entry
    return [found[step] for step in sorted(found)]


def latest_checkpoint(root: str | Path) -> Path | None:
    """Return the complete checkpoint with the highest step."""
    found = checkpoints(root)
    return found[-1] if found else None


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    """Return the driver's state of a checkpoint, with `step`. Raises CheckpointError if it cannot be read."""
    path = Path(checkpoint) / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.get("step") != step_of(Path(checkpoint)):
            raise ValueError(f"it is not the state of step {step_of(Path(checkpoint))}")
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{STATE_FILE} of {Path(checkpoint).name} cannot be read: {error}") from error
    return state


def step_of(checkpoint: Path) -> int:
    """Return the step from the folder's name. Raises ValueError."""
    match = _COMPLETE.fullmatch(checkpoint.resolve().name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named as a checkpoint, step_000010")
    return int(match[1])


def check(checkpoint: Path, spare: Collection[str] = ()) -> Checked:
    """Verify every file's checksum. `spare`: folders in it that only save time; damage there is only reported.

    Raises CheckpointError that names the first damaged file, PermissionError.
    """
    found = faults(checkpoint)
    if found is None:
        if read_state(checkpoint).get("checksums") is not None:
            raise CheckpointError(f"{CHECKSUMS_FILE} of {checkpoint.name} is missing")
        return Checked(sealed=False)
    needed = [fault for fault in found if fault.file.partition("/")[0] not in spare]
    if needed:
        more = f", and {len(needed) - 1} more of its files" if len(needed) > 1 else ""
        raise CheckpointError(f"{needed[0].file} of {checkpoint.name} {needed[0].what}{more}")
    read_state(checkpoint)
    return Checked(sealed=True, spare=tuple(found))


def _rename(temporary: Path, final: Path) -> None:
    """Replace a directory, which needs two calls: an old one of the same step is moved aside first, and back on error.

    If killed between the two renames, the old one keeps its hidden name and is lost; the next lower step is then
    latest.
    """
    aside = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    """Remove the leftovers of a killed writer."""
    for entry in root.iterdir():
        if entry.name.startswith((_TEMPORARY, _REPLACED)):
            shutil.rmtree(entry, ignore_errors=True)


def _sync_tree(directory: Path) -> None:
    for parent, _, files in os.walk(directory):
        for name in files:
            sync(Path(parent) / name)
        sync(Path(parent))


def _explain(root: Path, step: int, error: OSError) -> str:
    last = latest_checkpoint(root)
    intact = f"{last.name} is intact" if last else "there is no earlier checkpoint"
    sentences = (f"checkpoint of step {step} was not written to {root}: {error}.", room(root), f"{intact}.")
    return f"{' '.join(filter(None, sentences))} Free space, or set checkpoint.keep or run.dir, and use --resume"
