"""Read records from files, one at a time: file formats and their errors. Never interprets a field.

An unreadable record is yielded as a BadRecord, which the caller skips or reports. An unreadable rest of a file
(truncated, wrong format) is always a DataError, because the missing part is unknown.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.data.errors import DataError


@dataclass(frozen=True, slots=True)
class Record:
    """One record: its fields and its place ("train.jsonl, line 3" with the full path)."""

    fields: dict[str, Any]
    where: str


@dataclass(frozen=True, slots=True)
class BadRecord:
    """One unreadable record, and why."""

    reason: str
    where: str


def read_file(path: Path) -> Iterator[Record | BadRecord]:
    """Yield the records of one .jsonl, .jsonl.gz, .parquet or .arrow file, in file order."""
    match path.suffix:
        case ".parquet":
            return _read_parquet(path)
        case ".arrow":
            return _read_arrow(path)
        case _:
            return _read_json_lines(path)


def _read_json_lines(path: Path) -> Iterator[Record | BadRecord]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                yield _parse_line(line, f"{path.absolute()}, line {number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path.absolute()} is damaged after line {number} ({error}): it is truncated or not gzip; fetch it again"
        ) from error
    except OSError as error:
        raise DataError(f"{path.absolute()} cannot be read: {error.strerror or error}") from error


def _parse_line(line: bytes, where: str) -> Record | BadRecord:
    if not line.strip():
        return BadRecord("empty line", where)
    try:
        fields = json.loads(line.decode("utf-8-sig" if where.endswith("line 1") else "utf-8"))
    except UnicodeDecodeError as error:
        return BadRecord(f"not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}", where)
    except json.JSONDecodeError as error:
        return BadRecord(f"malformed JSON: {error.msg} at column {error.colno}", where)
    except (ValueError, RecursionError) as error:
        return BadRecord(f"malformed JSON: {error}", where)
    if not isinstance(fields, dict):
        return BadRecord(f"must be a JSON object, is a {type(fields).__name__}", where)
    return Record(fields, where)


def _read_parquet(path: Path) -> Iterator[Record | BadRecord]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _rows(file.iter_batches(batch_size=1024), path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path.absolute()} cannot be read as Parquet: {error}") from error


def _read_arrow(path: Path) -> Iterator[Record | BadRecord]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
            yield from _rows(reader, path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path.absolute()} cannot be read as an Arrow stream: {error}") from error


def _rows(batches: Any, path: Path) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for fields in batch.to_pylist():
            number += 1
            yield Record(fields, f"{path.absolute()}, row {number}")
