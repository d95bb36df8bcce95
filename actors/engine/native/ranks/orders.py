"""Orders of rank 0 to its followers, and their answers. Plain data."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.step.types import Int64Array, StepRows
from actors.engine.wire import Start
from contracts.engine import Sleep, Wake
from models.manifest import TensorSpec, WeightsManifest


@dataclass(frozen=True, slots=True)
class RankStart:
    """First message to a follower."""

    start: Start
    rank: int
    ranks: int
    port: int  # of rank 0's store on this machine


@dataclass(frozen=True, slots=True)
class Step:
    """Run the forward of these rows."""

    rows: StepRows


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy KV blocks, int64 [2, N] (from, to)."""

    pairs: Int64Array


@dataclass(frozen=True, slots=True)
class Move:
    """Copy K/V slots, int64 [2, N] (from, to)."""

    moves: Int64Array


@dataclass(frozen=True, slots=True)
class Resize:
    """Allocate buffers for this many drafted tokens per request and step."""

    max_nodes: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load new weights: this rank's parts. Answered."""

    manifest: WeightsManifest
    buffer: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BeginPieces:
    """Start new weights in pieces of a buffer that the specs describe."""

    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class TakePiece:
    """The next piece, which rank 0 broadcasts."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class EndPieces:
    """All pieces are sent. Answered."""


Order = Step | CopyBlocks | Move | Resize | LoadWeights | BeginPieces | TakePiece | EndPieces | Sleep | Wake
