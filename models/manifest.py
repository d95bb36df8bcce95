"""How weights travel: a manifest that says how to read one flat buffer. Plain data; no torch, no I/O."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str  # Hugging Face parameter name
    dtype: str  # "float32" | "bfloat16"
    shape: tuple[int, ...]
    offset_bytes: int  # into the flat buffer; a multiple of 64


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """How to read a flat weight buffer (uint8). `checksum` is zlib.crc32 of the whole buffer."""

    version: int
    checksum: int
    tensors: tuple[TensorSpec, ...]
    total_bytes: int
