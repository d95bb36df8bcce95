"""Files that survive a machine crash, and folders with detectable damage. Independent of their content; no torch.

A sealed folder holds CHECKSUMS_FILE: size and SHA-256 of every other file below it. Any changed bit is detected, also
in that file. It guards against damage, not against an adversary.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKSUMS_FILE = "checksums.json"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that differs from its sealed state; `file` is its path in the folder, with slashes."""

    file: str
    what: str  # "is missing"

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's entries, are on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(folder: Path) -> None:
    """Write CHECKSUMS_FILE for the present files of `folder`; nothing is synced. Raises OSError."""
    names = [name for name in _files(folder) if name != CHECKSUMS_FILE]
    found = dict(zip(names, _described([folder / name for name in names]), strict=True))
    for of in found.values():
        if isinstance(of, OSError):
            raise of
    (folder / CHECKSUMS_FILE).write_text(_text(found), encoding="utf-8")


def faults(folder: Path) -> list[Fault] | None:
    """Return the changes since `seal`, by name, ignoring files added later. None: the folder is not sealed.

    Reads every byte. Raises PermissionError if this user may not read one.
    """
    try:
        text = (folder / CHECKSUMS_FILE).read_text(encoding="utf-8")
        sealed: dict[str, Any] = json.loads(text)["files"]
        if text != _text(sealed):
            raise ValueError("another text")
        sizes = {name: int(of["bytes"]) for name, of in sealed.items()}
        if any(name.startswith("/") or ".." in name.split("/") for name in sealed):
            raise ValueError("a file outside the folder")
    except FileNotFoundError:
        return None
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [Fault(CHECKSUMS_FILE, "is damaged")]
    found, whole = list[Fault](), list[str]()
    for name, size in sizes.items():
        try:
            now = (folder / name).stat().st_size
        except FileNotFoundError:
            found.append(Fault(name, "is missing"))
            continue
        if now != size:
            found.append(Fault(name, f"is damaged: it has {now:,} bytes, and {size:,} were written"))
        else:
            whole.append(name)
    for name, of in zip(whole, _described([folder / name for name in whole]), strict=True):
        if isinstance(of, OSError):
            found.append(Fault(name, f"cannot be read: {of}"))
        elif of["sha256"] != sealed[name].get("sha256"):
            found.append(Fault(name, "is damaged: its sha256 is not the one that was written"))
    return found


def put_aside(folder: Path, why: str) -> Path:
    """Rename a folder to NAME.WHY, or NAME.WHY.2 and so on, where nothing uses or overwrites it. Returns that path."""
    target, number = folder.with_name(f"{folder.name}.{why}"), 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.{why}.{number}")
    folder.rename(target)
    sync(target.parent)
    return target


def room(path: Path) -> str:
    """Return a sentence about the free space of the file system of `path`, or of its first existing parent; "" if
    unknown."""
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if os.statvfs(there).f_files and not os.statvfs(there).f_favail:
            return "No inodes are free there: it holds too many files."
        return f"{shutil.disk_usage(there).free / 2**20:.0f} MiB are free there."
    except (OSError, StopIteration):
        return ""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of `path` to an OSError about a full or broken disk, which a write raises without a file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in FULL | {errno.EIO, errno.EROFS, errno.EFBIG}:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _text(files: dict[str, Any]) -> str:
    """Return the text of CHECKSUMS_FILE; its first line is the checksum of the rest."""
    body = json.dumps(files, indent=1, sort_keys=True)
    return f'{{"sha256": "{hashlib.sha256(body.encode()).hexdigest()}",\n"files": {body}}}\n'


def _described(paths: list[Path]) -> list[Any]:
    """Return size and checksum of each file, on a few threads (hashlib releases the interpreter lock).

    An OSError replaces the entry of an unreadable file; PermissionError is raised."""
    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1, len(paths)))) as pool:
        return list(pool.map(_describe, paths))


def _describe(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except PermissionError:
        raise
    except OSError as error:
        return error
