"""Arrays by name as a file that is there whole or not at all. Owns no meaning of them."""

from pathlib import Path

import numpy as np

from contracts.codec import Columns


def write_arrays(path: Path, columns: Columns) -> None:
    """Either all of it is there under its name, or nothing. Raises OSError."""
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
    """Raises OSError."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
