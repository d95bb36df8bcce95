"""Format of transferred tensors: a manifest that describes one flat buffer. Plain data; no torch, no I/O.

Defines the transferable dtypes, and the alignment of everything in flat memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

# By dtype; models.dtypes maps the same names to torch. One-byte dtypes are for low-bit weights.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}
ALIGNMENT_BYTES = 64  # of the start of each tensor: a cache line, and an AVX-512 load


def aligned(size_bytes: int) -> int:
    """Round up to the next multiple of ALIGNMENT_BYTES."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str  # Hugging Face parameter name
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    offset_bytes: int  # into the flat buffer; a multiple of ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """How to read a flat weight buffer (uint8). `checksum` is models.checksum.checksum of the whole buffer."""

    version: int
    checksum: int
    tensors: tuple[TensorSpec, ...]
    total_bytes: int


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[TensorSpec, ...], int]:
    """Return the places of tensors (name, dtype, shape), laid out consecutively in one buffer, and its size in
    bytes."""
    specs, offset = [], 0
    for name, dtype, shape in tensors:
        specs.append(TensorSpec(name, dtype, shape, offset))
        offset += aligned(math.prod(shape) * ITEM_BYTES[dtype])
    return tuple(specs), offset
