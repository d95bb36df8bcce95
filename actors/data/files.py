"""Files of a data path: its forms and splits. Never opens a record.

Forms: one file (.jsonl, .jsonl.gz, .parquet), a folder written by `datasets.save_to_disk` (with or without splits), or
a folder of such files with the split in file or folder names (`data/train-00000-of-00002.parquet`, `test.jsonl`,
`train/part-0.parquet`).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.data.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
FORMS = "a .jsonl, .jsonl.gz or .parquet file, a folder of them, or a datasets.save_to_disk folder"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_SHARD = re.compile(r"(?P<name>.+?)(?:[-_.]\d+(?:-of-\d+)?)?$")


def resolve(path: str, splits: Sequence[str], key: str) -> list[Path]:
    """Return the files of the first of `splits` that the path has, in order. A file, or a folder without splits, has no
    splits to choose from.

    `key` is the configuration key for error messages.
    """
    root = Path(path).expanduser()
    if root.is_file():
        if not root.name.endswith(SUFFIXES):
            raise DataError(f"{key}: {root.absolute()} has an unknown form; give {FORMS}{_conversion(root)}")
        return [root]
    if not root.is_dir():
        wrong = "is neither a file nor a folder" if root.exists() else "does not exist"
        raise DataError(f"{key}: {root.absolute()} {wrong}; give {FORMS}")
    if (root / "dataset_dict.json").is_file():
        available = [str(name) for name in _read_json(root / "dataset_dict.json", key)["splits"]]
        return _saved_dataset(root / _choose(splits, available, root, key), key)
    if (root / "state.json").is_file():
        return _saved_dataset(root, key)
    return _folder(root, splits, key)


def _conversion(file: Path) -> str:
    """Return how to convert a common other format to a supported one."""
    source = f"'{file.name}'"
    match file.suffix.lower():
        case ".csv":
            read = f"read_csv({source})"
        case ".tsv":
            read = f"read_csv({source}, sep='\\t')"
        case ".json":
            read = f"read_json({source})"
        case _:
            return ""
    return f"; with pandas: {read}.to_json('{file.stem}.jsonl', orient='records', lines=True)"


def _choose(splits: Sequence[str], available: Sequence[str], root: Path, key: str) -> str:
    for split in splits:
        if split in available:
            return split
    raise DataError(
        f"{key}: {root.absolute()} has the splits {', '.join(sorted(available))}, none of {', '.join(splits)}; "
        f"choose one with {key.removesuffix('.path') + '.' if key.endswith('.path') else key + '_'}split"
    )


def _saved_dataset(root: Path, key: str) -> list[Path]:
    state = _read_json(root / "state.json", key)
    files = [root / str(entry["filename"]) for entry in state.get("_data_files") or []]
    for file in files:
        if not file.is_file():
            raise DataError(f"{key}: {file.absolute()} is missing from a datasets.save_to_disk folder")
    if not files:
        raise DataError(f"{key}: {root.absolute()} lists no data files in state.json")
    return files


def _read_json(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {path.absolute()} cannot be read: {error}") from error


def _folder(root: Path, splits: Sequence[str], key: str) -> list[Path]:
    hidden = re.compile(r"(^|/)\.")
    files = sorted(
        file
        for file in root.rglob("*")
        if file.name.endswith(SUFFIXES) and not hidden.search(file.relative_to(root).as_posix()) and file.is_file()
    )
    if not files:
        raise DataError(f"{key}: {root.absolute()} holds no data files; give {FORMS}")
    wanted = {*_SPLITS, *splits}
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file, root, wanted), []).append(file)
    chosen = by_split[_choose(splits, list(by_split), root, key)] if set(by_split) != {""} else files
    forms = {_suffix(file) for file in chosen}
    if len(forms) > 1:
        raise DataError(
            f"{key}: {root.absolute()} holds the same split as {' and '.join(sorted(forms))}, perhaps twice the same "
            "data; give one file, or a folder with one form"
        )
    return chosen


def _split_of(file: Path, root: Path, known: set[str]) -> str:
    """Return the split in the file's name, else in a folder's below the root, else ""."""
    stem = _SHARD.fullmatch(file.name.removesuffix(_suffix(file)))
    if stem is not None and stem["name"] in known:
        return stem["name"]
    folders = file.relative_to(root).parts[:-1]
    return next((folder for folder in reversed(folders) if folder in known), "")


def _suffix(file: Path) -> str:
    return next(suffix for suffix in reversed(SUFFIXES) if file.name.endswith(suffix))
