"""JSON-lines files that survive the death of their writer. Owns the format; knows nothing of what the records mean.

A record is one line, handed to the operating system when it is written: a killed process loses none but the line it
was writing, and readers skip such a torn line. JSON has no NaN: a value that is not finite is written as null and
named in the record's `nonfinite`, so that the file stays JSON and the fact stays known.
"""

import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Journal:
    """Appends records to one file; calls may come from any thread."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        line = encode(record) + "\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(line)

    def close(self) -> None:
        with self._lock:
            self._file.close()


def encode(record: Mapping[str, Any]) -> str:
    """One line of strict JSON. Floats keep all their digits, so that two runs can be compared exactly."""
    nonfinite = {key: repr(value) for key, value in record.items() if _nonfinite(value)}
    if nonfinite:
        record = {**{k: None if k in nonfinite else v for k, v in record.items()}, "nonfinite": nonfinite}
    return json.dumps(record, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)


def read(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file; [] if there is none. A torn or foreign line is left out."""
    if not path.is_file():
        return []
    records = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _decode(line)
            if record is not None:
                records.append(record)
    return records


def cut(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Keep only whole records for which `keep` holds, atomically. Returns how many lines went."""
    if not path.is_file():
        return 0
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if (record := _decode(line)) is not None and keep(record)]
    if len(kept) < len(lines):
        replace(path, "".join(kept))
    return len(lines) - len(kept)


def replace(path: Path, text: str) -> None:
    """Write a whole file so that no reader ever sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _decode(line: str) -> dict[str, Any] | None:
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _nonfinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _plain(value: Any) -> Any:
    """numpy scalars and arrays as Python numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
