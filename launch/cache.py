"""What is made once and found again by the content of its inputs: warm starts, fitted drafters. Owns how contents are
hashed and how a finished folder takes its place.
"""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from launch.errors import PacelineError


def keep(made: Path, folder: Path, what: str) -> None:
    """`made` becomes `folder`, unless another run made the same one meanwhile. Raises PacelineError."""
    try:
        made.rename(folder)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        if not (folder / "config.json").is_file():
            raise PacelineError(f"cannot keep {what} in {folder}: {error}") from error


def add_files(digest: "hashlib.blake2b", folders: Iterable[Path], *data: Path) -> None:
    """Names and contents: of the files in the folders of model and tokenizer, each folder once and nothing below it,
    and of the data, files or trees."""
    files = [file for folder in dict.fromkeys(folders) for file in sorted(folder.iterdir())]
    read = [file for path in data for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    for file in [*files, *read]:
        if file.is_file():
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "blake2b").digest())
