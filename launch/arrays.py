"""Many arrays as few flat ones, and those as a file that is there whole or not at all. Owns no meaning of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Packed = dict[str, NDArray[Any]]


def flat(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """[n_1] .. [n_k] -> [sum n], one behind the other; empty for none."""
    return np.concatenate([np.empty(0, dtype), *arrays])


def parts(flat: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """What was made flat, by its lengths: views."""
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def write_arrays(path: Path, packed: Packed) -> None:
    """Either all of it is there under its name, or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, **packed)  # type: ignore[arg-type]
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> Packed:
    """Raises OSError."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
