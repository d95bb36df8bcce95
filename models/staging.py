"""Copy small arrays to a device and back without pageable copies: pinned buffers, asynchronous copies, events. On CPU
the same calls copy plainly, for tests.

Device addresses never change between uploads, as CUDA graphs require.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Upload:
    """One static device buffer, filled alternately from `buffers` pinned ones.

    A pinned buffer is reused only after its copy has completed. With several, the host waits for a pending copy only if
    it is that many uploads ahead.
    """

    def __init__(self, size_bytes: int, device: torch.device, *, buffers: int = 2) -> None:
        self.device = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._pinned = device.type == "cuda"
        self._hosts = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned) for _ in range(buffers)]
        self.hosts: list[NDArray[np.uint8]] = [host.numpy() for host in self._hosts]
        self._copied = [_event() if self._pinned else None for _ in range(buffers)]
        self._sent = [False] * buffers
        self._next = 0

    def begin(self) -> int:
        """Return the index in `hosts` of the buffer that may be written now."""
        place, event = self._next, self._copied[self._next]
        if event is not None and self._sent[place] and not event.query():  # type: ignore[no-untyped-call]
            event.synchronize()
        return place

    def send(self, used_bytes: int) -> None:
        """Copy the first bytes of the buffer chosen by `begin` to the device, in order on the current stream."""
        place, event = self._next, self._copied[self._next]
        self.device[:used_bytes].copy_(self._hosts[place][:used_bytes], non_blocking=True)
        if event is not None:
            event.record()
        self._sent[place] = True
        self._next = (place + 1) % len(self._hosts)

    def numbers(self, array: NDArray[np.int64]) -> Tensor:
        """Return an int64 array as a tensor on the device, valid until the next upload."""
        place = self.begin()
        self.hosts[place][: array.nbytes].view(np.int64)[:] = array.reshape(-1)
        self.send(array.nbytes)
        return self.device[: array.nbytes].view(torch.int64).view(array.shape)


class Download:
    """int32 words from a device, by one asynchronous copy and one wait."""

    def __init__(self, words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.empty(words, dtype=torch.int32, pin_memory=pinned)
        self._words = self._host.numpy()
        self._copied = _event() if pinned else None

    def fetch(self, words: Tensor) -> NDArray[np.int32]:
        """Return the device's int32 [n] after a wait for all its earlier work. Valid until the next call."""
        count = words.shape[0]
        self._host[:count].copy_(words, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
            self._copied.synchronize()
        return self._words[:count]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
