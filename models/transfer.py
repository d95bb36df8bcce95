"""Copy host arrays to a device and back: pinned, asynchronous, several in one copy.

On CUDA a copy from pageable memory waits for the device; one from pinned memory does not, and torch does not reuse
pinned memory before its copies are done.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.manifest import aligned

Array = NDArray[Any]


def upload(arrays: Mapping[str, Array | Sequence[Array]], device: torch.device | str) -> dict[str, Tensor]:
    """Return the arrays as tensors of their dtypes and shapes on `device`, in one asynchronous copy. A sequence of
    arrays is concatenated by rows.

    On the CPU, contiguous writable arrays share their memory with the tensors.
    """
    device = torch.device(device)
    if device.type == "cpu":
        joined = {name: a if isinstance(a, np.ndarray) else np.concatenate(a) for name, a in arrays.items()}
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in joined.items()}
    parts = {name: [given] if isinstance(given, np.ndarray) else list(given) for name, given in arrays.items()}
    sizes = {name: sum(array.nbytes for array in of) for name, of in parts.items()}
    room = sum(map(aligned, sizes.values()))  # so every dtype's views are aligned
    host = torch.empty(room, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = host.numpy()
    starts, at = dict[str, int](), 0
    for name, of in parts.items():
        starts[name] = at
        for array in of:
            memory[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at += array.nbytes
        at = aligned(at)
    there = host.to(device, non_blocking=True)
    return {
        name: there[starts[name] : starts[name] + sizes[name]]
        .view(_dtype(of[0]))
        .view(sum(len(array) for array in of), *of[0].shape[1:])
        for name, of in parts.items()
    }


def _dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def start_download(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous host copy of the tensor in `dtype`. On CUDA it is filled once the current stream's work so
    far is done: wait for that before reading it."""
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", dtype, copy=True).contiguous()
    host = torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    return host.copy_(tensor.detach().to(dtype), non_blocking=True)
