"""JSON-lines files that survive the death of their writer. Owns the format; knows nothing of the records' meaning.

A record is one line, handed to the operating system when written. So a killed process loses only the line that it was
writing, and readers skip such a torn line. JSON has no NaN: a value that is not finite is written as null and named in
the record's `nonfinite`. So the file stays JSON and the fact is kept.
"""

import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models.durable import naming

Fits = Callable[[Any], bool]


def _is(*kinds: type) -> Fits:
    return lambda value: type(value) in kinds


def _list_of(fits: Fits) -> Fits:
    return lambda value: type(value) is list and all(map(fits, value))


def _turn(value: Any) -> bool:
    return type(value) is dict and _NUMBER(value.get("reward"))


_INTEGER, _TEXT, _NUMBER = _is(int), _is(str), _is(int, float, type(None))  # a number that is not finite is null
_LIST, _TABLE = _is(list, type(None)), _is(dict, type(None))  # or it is left out
# Required types of values that readers use unchecked, by file name. A line with other types is foreign.
# is foreign.
_SAMPLE: dict[str, Fits] = {
    **{"step": _INTEGER, "prompt": _TEXT, "response": _TEXT, "reward": _NUMBER},
    "turns": lambda value: value is None or _list_of(_turn)(value),
}
FIELDS: dict[str, dict[str, Fits]] = {
    "metrics.jsonl": {"step": _INTEGER, "kind": _TEXT},
    "events.jsonl": {"kind": _TEXT},
    "lengths.jsonl": {"step": _INTEGER, "lengths": _list_of(_INTEGER)},
    "budget.jsonl": {"step": _INTEGER, "rollouts": _list_of(_INTEGER)},
    "drafter.jsonl": {"step": _INTEGER, "published": _LIST, "rolled_back": _LIST, "counts": _TABLE, "levels": _TABLE},
    "samples.jsonl": _SAMPLE,
    "eval_samples.jsonl": _SAMPLE,
    **{f"{name}.jsonl": {"step": _INTEGER} for name in ("speculation", "eval_prompts", "timeline")},
}


class Journal:
    """Appends records to one file; calls may come from any thread. An OSError names the file."""

    def __init__(self, path: Path) -> None:
        self._lock, self._path = threading.Lock(), path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        line = encode(record) + "\n"
        with self._lock, naming(self._path):
            if not self._file.closed:
                self._file.write(line)

    def sync(self) -> None:
        """Wait until every line is on disk (fsync)."""
        with self._lock, naming(self._path):
            if not self._file.closed:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        with self._lock:
            self._file.close()


def encode(record: Mapping[str, Any]) -> str:
    """Encode a record as one line of strict JSON. Floats keep all their digits, so that two runs can be compared
    exactly."""
    nonfinite = {key: repr(value) for key, value in record.items() if _nonfinite(value)}
    if nonfinite:
        record = {**{k: None if k in nonfinite else v for k, v in record.items()}, "nonfinite": nonfinite}
    return json.dumps(record, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all whole records of a file; [] if there is none. Torn and foreign lines are left out."""
    if not path.is_file():
        return []
    records, fields = [], FIELDS.get(path.name, {})
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _decode(line, fields)
            if record is not None:
                records.append(record)
    return records


def cut(path: Path, last: int | None) -> int:
    """Keep only whole records, of RL steps up to `last` (None: of all), atomically. Returns how many lines went."""
    if not path.is_file():
        return 0
    fields = FIELDS.get(path.name, {})
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = []
    for line in lines:
        record = _decode(line, fields)
        if record is not None and (last is None or int(record.get("step", 0)) <= last):
            kept.append(line)
    if len(kept) < len(lines):
        replace(path, "".join(kept))
    return len(lines) - len(kept)


def replace(path: Path, text: str) -> None:
    """Write a whole file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _decode(line: str, fields: Mapping[str, Fits]) -> dict[str, Any] | None:
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(fits(record.get(name)) for name, fits in fields.items()):
        return None
    return record


def _nonfinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _plain(value: Any) -> Any:
    """Convert numpy scalars and arrays to Python numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
