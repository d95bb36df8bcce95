"""The learner's inputs since its last checkpoint, per RL step: enough to repeat its updates without sampling again.

Owns their storage (memory first, then the run's folder) and its size. Never looks at the numbers.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.codec import Codec, Columns
from contracts.training import StepResult, TrainSequence
from launch.arrays import read_arrays, write_arrays

# Bytes per response token: 12, of which 4 only if the engine returns log-probs at temperature 1; 8 more if tokens have
# their own advantages.
_SEQUENCES = Codec(TrainSequence)
IN_MEMORY_BYTES = 512 * 2**20  # of the driver; later steps go to disk until the next checkpoint


@dataclass(frozen=True, slots=True)
class KeptStep:
    """One RL step's update: its arguments and its result."""

    step: int
    asked: int | None
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    packed: Columns | Path

    @property
    def sequences(self) -> list[TrainSequence]:
        """Unpacked each time. Raises OSError if they are on disk and cannot be read."""
        packed = self.packed if isinstance(self.packed, dict) else read_arrays(self.packed)
        return _SEQUENCES.unpack(packed)


class KeptSteps:
    """The kept steps, for the driver's thread. It owns the folder, and empties it at the start, at each `clear`, and at
    the end."""

    def __init__(self, folder: Path, in_memory_bytes: int = IN_MEMORY_BYTES) -> None:
        self._folder, self._limit_bytes = folder, in_memory_bytes
        self._entries: list[KeptStep] = []
        self._in_memory_bytes = 0
        self.bytes = 0  # of all steps
        shutil.rmtree(folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[KeptStep]:
        """Oldest first."""
        return iter(self._entries)

    def add(self, step: int, sequences: Sequence[TrainSequence], asked: int | None, result: StepResult) -> None:
        """Keep a step after its update. Copies the arrays, since the object store must be able to free them. Raises
        OSError if the disk has no room; earlier steps stay."""
        packed = _SEQUENCES.pack(sequences)
        size = sum(array.nbytes for array in packed.values())
        place: Columns | Path = packed
        if self._in_memory_bytes + size > self._limit_bytes:
            place = self._folder / f"step_{step:06d}.npz"
            write_arrays(place, packed)
        else:
            self._in_memory_bytes += size
        self._entries.append(KeptStep(step, asked, result.losses, result.grad_norms, place))
        self.bytes += size

    def clear(self) -> None:
        self._entries.clear()
        self._in_memory_bytes = self.bytes = 0
        shutil.rmtree(self._folder, ignore_errors=True)
