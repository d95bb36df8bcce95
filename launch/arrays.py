"""Write and read named arrays as one file, atomically. Owns no meaning of the arrays."""

from pathlib import Path

import numpy as np

from contracts.codec import Columns


def write_arrays(path: Path, columns: Columns) -> None:
    """Write the arrays to `path` atomically: a reader finds the whole file or none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, **columns)  # type: ignore[arg-type]
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> Columns:
    """Read what `write_arrays` wrote. Raises OSError."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
