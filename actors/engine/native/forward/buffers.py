"""How a step's small integer arrays reach the model's device. Owns one static buffer; never allocates in a step.

On CPU the numpy arrays are used where they are. On CUDA every array has a fixed region of one pinned buffer, and one
asynchronous copy moves them all: addresses never change between steps, as CUDA graphs require.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.manifest import aligned


class StepBuffers:
    """Named regions: `capacity` says the most elements (of 8 bytes at most) that each array will ever have."""

    def __init__(self, capacity: Mapping[str, int], device: torch.device, *, staged: bool | None = None) -> None:
        self._staged = device.type == "cuda" if staged is None else staged
        self._offsets: dict[str, int] = {}
        self._last: Mapping[str, NDArray[np.generic]] | None = None
        self._tensors: dict[str, Tensor] = {}
        if self._staged:
            size = 0
            for name, elements in capacity.items():
                self._offsets[name] = size
                size += aligned(elements * 8)
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._host_bytes = self._host.numpy()
            self._device = torch.empty(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def upload(self, arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
        """The arrays as tensors on the device, valid until the next upload.

        Waits for the previous copy: the pinned buffer is written again, and nobody waited for a step without draws.
        """
        if not self._staged:
            if arrays is not self._last:  # The same arrays may come again, with other values.
                self._last, self._tensors = arrays, {name: torch.from_numpy(array) for name, array in arrays.items()}
            return self._tensors
        if self._copied is not None:
            self._copied.synchronize()
        used = 0
        for name, array in arrays.items():
            start = self._offsets[name]
            raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            self._host_bytes[start : start + raw.size] = raw
            used = max(used, start + raw.size)
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        tensors = {}
        for name, array in arrays.items():
            start = self._offsets[name]
            dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
            tensors[name] = self._device[start : start + array.nbytes].view(dtype).view(array.shape)
        return tensors
