"""The memory of a KV cache through sleep and wake, and whether its address survives.

On CUDA: virtual memory of the driver, so that sleep frees the memory and captured graphs stay valid. If the driver
refuses (logged once), torch's allocator; graphs are then captured again after a sleep, and a small cache is kept. On
CPU: zero pages, which use no memory until they are written. They are kept during sleep if they are a small part of the
memory that this process may use: the first pass over new pages waits for each of them.
"""

import logging
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.engine.native.forward.virtual_memory import CudaDriver, VirtualMemory, VirtualMemoryError
from actors.host_memory import total_bytes

_log = logging.getLogger(__name__)
SMALL_BYTES = 256 << 20  # not worth new graphs after a sleep
SMALL_SHARE = 32  # part of the host's memory, or of a container's, that a CPU's cache keeps


class AllocatedMemory:
    """torch's allocator, or zero pages on CPU. `tensor` is uint8 [size_bytes], valid while awake."""

    def __init__(self, size_bytes: int, device: torch.device, *, keep_bytes: int = 0) -> None:
        """keep_bytes: a memory of at most this size is kept during sleep."""
        self._size_bytes, self._device, self._keep = size_bytes, device, size_bytes <= keep_bytes
        self._tensor: Tensor | None = self._allocate()

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, "asleep"
        return self._tensor

    def sleep(self) -> None:
        """Release the memory unless it is small. Its contents are lost."""
        if not self._keep:
            self._tensor = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def wake(self) -> bool:
        """Allocate memory again, all zeros if it was released. Return whether its address is unchanged."""
        if self._tensor is not None:
            return True
        self._tensor = self._allocate()
        return False

    def _allocate(self) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(self._size_bytes, dtype=torch.uint8, device=self._device)
        # torch.zeros writes every page; numpy's use no memory until written
        return torch.from_numpy(np.zeros(self._size_bytes, np.uint8))


class MappedMemory:
    """The driver's virtual memory, with a fixed address. Raises VirtualMemoryError if the driver refuses."""

    def __init__(self, size_bytes: int, device: torch.device, driver: CudaDriver) -> None:
        number = torch.cuda.current_device() if device.index is None else device.index
        memory = self._memory = VirtualMemory(size_bytes, number, driver)
        place = _Range(memory.address, size_bytes)
        try:
            self.tensor: Tensor = torch.as_tensor(place, device=device)
            if self.tensor.data_ptr() != memory.address:
                raise VirtualMemoryError("torch made a copy of the range")
            self.tensor.zero_()
        except Exception as error:
            memory.close()
            raise VirtualMemoryError(f"torch has no tensor over the driver's memory: {error}") from error
        weakref.finalize(place, _closed, memory, device).atexit = False  # the end of the process frees everything

    def sleep(self) -> None:
        torch.cuda.synchronize(self.tensor.device)
        self._memory.unmap()

    def wake(self) -> bool:
        if not self._memory.mapped:
            try:
                self._memory.map()
            except VirtualMemoryError:
                torch.cuda.empty_cache()  # torch's cache may occupy the needed memory
                self._memory.map()
            self.tensor.zero_()
        return True


class _Range:
    """Device memory for torch to use without a copy. Torch keeps this object while a tensor exists."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


KVMemory = AllocatedMemory | MappedMemory


def _closed(memory: VirtualMemory, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    memory.close()


def kv_memory(size_bytes: int, device: torch.device, driver: CudaDriver | None = None) -> KVMemory:
    """Return the best memory for this device. driver: default the installed one."""
    if device.type != "cuda":
        return AllocatedMemory(size_bytes, device, keep_bytes=total_bytes() // SMALL_SHARE)
    try:
        return MappedMemory(size_bytes, device, driver or CudaDriver())
    except VirtualMemoryError as error:
        _log.warning("the KV cache's address will not survive sleep, so graphs are captured again after it: %s", error)
        return AllocatedMemory(size_bytes, device, keep_bytes=SMALL_BYTES)
