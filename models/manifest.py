"""How tensors travel: a manifest that says how to read one flat buffer. Plain data; no torch, no I/O.

Owns the one table of dtypes that may travel, and the alignment of everything that is laid out in flat memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

# By dtype; models.dtypes has the same names as torch knows them. Those of one byte are of weights in few bits.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}
ALIGNMENT_BYTES = 64  # of the start of each tensor: a cache line, and what AVX-512 loads


def aligned(size_bytes: int) -> int:
    """Rounded up to the next multiple of ALIGNMENT_BYTES."""
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
    """Where tensors (name, dtype, shape) lie in one buffer, one behind the other, and its size in bytes."""
    specs, offset = [], 0
    for name, dtype, shape in tensors:
        specs.append(TensorSpec(name, dtype, shape, offset))
        offset += aligned(math.prod(shape) * ITEM_BYTES[dtype])
    return tuple(specs), offset
