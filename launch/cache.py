"""Cached artifacts, found by a hash of their inputs: warm starts, fitted drafters.

Owns how contents are hashed and how a finished folder takes its place.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from launch.errors import PacelineError
from models.durable import CHECKSUMS_FILE, faults, put_aside, seal, sync


def damaged(folder: Path) -> str:
    """Check the cached `folder`. A damaged one is moved aside, and the damage is returned; else ""."""
    found = faults(folder) if folder.is_dir() else None
    if not found:
        return ""
    aside = put_aside(folder, "damaged")
    return f"{found[0]} in {folder}: it is made again; {aside} is not used any more, and may be deleted"


def say(out: TextIO | None, text: str) -> None:
    """A line of what is made; nothing where there is nothing to say, or nobody to say it to."""
    if out is not None and text:
        print(text, file=out, flush=True)


def is_kept(folder: Path) -> bool:
    """Whether it is there. Ask `damaged` first."""
    return (folder / "config.json").is_file()


def require_readable(folder: Path) -> None:
    """Raise PacelineError if this user may not read a file in `folder`. The folder need not exist."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.is_file() and not os.access(file, os.R_OK):
            raise PacelineError(
                f"{file} cannot be read by this user: permission denied", remedy=f"its owner can: chmod a+r {file}"
            )


def keep(made: Path, folder: Path, what: str) -> None:
    """Seal `made` and rename it to `folder`, unless another run did so meanwhile. Raises PacelineError."""
    try:
        seal(made)
        sync(made / CHECKSUMS_FILE)
        made.rename(folder)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        if not (folder / "config.json").is_file():
            raise PacelineError(f"cannot keep {what} in {folder}: {error}") from error


def add_files(digest: "hashlib.blake2b", folders: Iterable[Path], *data: Path) -> None:
    """Add names and contents to the digest: those of the files directly in `folders` (each folder once), and of `data`
    (files or trees)."""
    files = [file for folder in dict.fromkeys(folders) for file in sorted(folder.iterdir())]
    read = [file for path in data for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    for file in [*files, *read]:
        if file.is_file():
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "blake2b").digest())
