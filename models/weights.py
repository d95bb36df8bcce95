"""Weights in one flat buffer, for the transfer from learner to engines: the byte layout and its checksum."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.checksum import checksum
from models.dtypes import DTYPE_NAMES, DTYPES
from models.manifest import TensorSpec, WeightsManifest, lay_out
from models.pieces import HOST, in_pieces, to_host

Buffer = np.ndarray[Any, np.dtype[np.uint8]]


class WeightsCorruptError(RuntimeError):
    """A weight buffer is not the one that its manifest describes."""


def pack(named: Mapping[str, Tensor], version: int, *, out: Buffer | None = None) -> tuple[WeightsManifest, Buffer]:
    """Copy tensors (of models.dtypes, any device) into one uint8 buffer, each at a multiple of 64 bytes.

    `out`: a writable buffer to reuse; a ValueError names the needed size if it differs.
    """
    for name, tensor in named.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name}: weights travel as {', '.join(DTYPE_NAMES.values())}, not as {tensor.dtype}")
    described = [(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in named.items()]
    places = {tensor.device for tensor in named.values()}
    device = places.pop() if len(places) == 1 else HOST
    return pack_each(*lay_out(described), named.items(), version, device=device, out=out)


def pack_each(
    specs: Sequence[TensorSpec],
    total_bytes: int,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    *,
    device: torch.device = HOST,
    out: Buffer | None = None,
) -> tuple[WeightsManifest, Buffer]:
    """Same as `pack`, for tensors that arrive one by one in the order of `specs`; each is released before the next.

    `device`: the tensors' device; besides them it holds two pieces of the buffer at a time."""
    if out is None:
        out = np.zeros(total_bytes, dtype=np.uint8)
    elif out.dtype != np.uint8 or out.shape != (total_bytes,):
        raise ValueError(f"the weight buffer must be uint8 [{total_bytes}], got {out.dtype} {list(out.shape)}")
    to_host(in_pieces(specs, total_bytes, tensors, device, into=out if device.type == "cpu" else None), out, device)
    return WeightsManifest(version, checksum(out), tuple(specs), total_bytes), out


def unpack(manifest: WeightsManifest, buffer: Buffer, *, verify: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every entry, as views into the buffer (no copy: do not write to them, keep the buffer).

    Raises WeightsCorruptError, before the first tensor, if size or checksum differ from the manifest's; verify=False
    skips the checksum (for a second reader of a verified buffer).
    """
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or buffer.size != manifest.total_bytes:
        raise WeightsCorruptError(
            f"weights version {manifest.version}: buffer is {buffer.dtype} {list(buffer.shape)}, "
            f"the manifest says uint8 [{manifest.total_bytes}]"
        )
    if verify and (found := checksum(buffer)) != manifest.checksum:
        raise WeightsCorruptError(
            f"weights version {manifest.version}: checksum {found:#x}, the manifest says {manifest.checksum:#x}"
        )
    with warnings.catch_warnings():  # buffers from Ray's object store are read-only; views must not be written
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(buffer)
    return ((spec.name, _view(flat, spec)) for spec in manifest.tensors)


def _view(flat: Tensor, spec: TensorSpec) -> Tensor:
    dtype = DTYPES[spec.dtype]
    count = math.prod(spec.shape)
    end = spec.offset_bytes + count * dtype.itemsize
    if end > flat.numel():
        raise WeightsCorruptError(f"{spec.name} ends at byte {end} of a buffer of {flat.numel()}")
    if count == 0:
        return torch.empty(spec.shape, dtype=dtype)  # an empty view has no stride to reinterpret
    return flat[spec.offset_bytes : end].view(dtype).view(spec.shape)
