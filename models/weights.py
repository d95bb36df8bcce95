"""Weights in one flat buffer: what travels between learner and engines. Owns the byte layout and its checksum; never
decides when weights move or through what."""

import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.dtypes import DTYPE_NAMES, DTYPES
from models.manifest import TensorSpec, WeightsManifest, aligned

Buffer = np.ndarray[Any, np.dtype[np.uint8]]


class WeightsCorruptError(RuntimeError):
    """A weight buffer is not the one that its manifest describes."""


def checksum(buffer: Buffer) -> int:
    """zlib.crc32 of the whole buffer."""
    return zlib.crc32(np.ascontiguousarray(buffer).data)


def pack(named: Mapping[str, Tensor], version: int, *, out: Buffer | None = None) -> tuple[WeightsManifest, Buffer]:
    """Copy tensors (float32 or bfloat16, any device) into one uint8 buffer, each at a multiple of 64 bytes.

    `out`: a writable buffer to reuse; it must have exactly the needed size, else a ValueError says which that is.
    """
    specs: list[TensorSpec] = []
    offset = 0
    for name, tensor in named.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name}: weights travel as float32 or bfloat16, not {tensor.dtype}")
        specs.append(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), offset))
        offset += aligned(tensor.numel() * tensor.element_size())
    if out is None:
        out = np.zeros(offset, dtype=np.uint8)
    elif out.dtype != np.uint8 or out.shape != (offset,):
        raise ValueError(f"the weight buffer must be uint8 [{offset}], got {out.dtype} {list(out.shape)}")
    else:
        out.fill(0)  # The padding between tensors is part of the checksum.
    flat = torch.from_numpy(out)
    for spec, tensor in zip(specs, named.values(), strict=True):
        _view(flat, spec).copy_(tensor.detach())
    return WeightsManifest(version, checksum(out), tuple(specs), offset), out


def unpack(manifest: WeightsManifest, buffer: Buffer, *, verify: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every entry, as views into the buffer (no copy: do not write to them, keep the buffer).

    Raises WeightsCorruptError, before the first tensor, if size or checksum differ from the manifest's; verify=False
    skips the checksum (a second reader of a buffer that was verified).
    """
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or buffer.size != manifest.total_bytes:
        raise WeightsCorruptError(
            f"weights version {manifest.version}: buffer is {buffer.dtype} {list(buffer.shape)}, "
            f"the manifest says uint8 [{manifest.total_bytes}]"
        )
    if verify and (found := checksum(buffer)) != manifest.checksum:
        raise WeightsCorruptError(
            f"weights version {manifest.version}: checksum {found:#010x}, the manifest says {manifest.checksum:#010x}"
        )
    with warnings.catch_warnings():  # Buffers from Ray's object store are read-only; so are our views, by contract.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(buffer)
    return ((spec.name, _view(flat, spec)) for spec in manifest.tensors)


def _view(flat: Tensor, spec: TensorSpec) -> Tensor:
    dtype = DTYPES[spec.dtype]
    count = 1
    for size in spec.shape:
        count *= size
    end = spec.offset_bytes + count * dtype.itemsize
    if end > flat.numel():
        raise WeightsCorruptError(f"{spec.name} ends at byte {end} of a buffer of {flat.numel()}")
    if count == 0:
        return torch.empty(spec.shape, dtype=dtype)  # an empty view has no stride to reinterpret
    return flat[spec.offset_bytes : end].view(dtype).view(spec.shape)
