"""One end of the socket between a supervisor and its child: pickled messages, with large arrays in shared memory.

A message's large arrays are sent as one anonymous memory file, by its descriptor. It has no name to clean up, and its
memory is freed once both sides have closed it, however they end.
"""

import io
import math
import mmap
import os
import pickle
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
APART_BYTES = 1 << 16  # larger arrays are copied once, into shared memory, instead of through the socket
ALIGNED_BYTES = 64  # alignment of arrays in shared memory


@dataclass(frozen=True, slots=True)
class Ready:
    """The child is up, its first message; or it is ready again, having done what is answered."""


@dataclass(frozen=True, slots=True)
class Close:
    """Request of the parent that the child end."""


class Link:
    """Sending is thread-safe; receiving is for one thread. Messages are unpickled: both ends run our own code."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # keeps a message and its descriptor together

    def send(self, message: object) -> None:
        """Send a message. Its arrays are copied and may be reused afterwards. Raises OSError if the other end is
        closed."""
        file = io.BytesIO()
        pickler = _MemoryPickler(file)
        pickler.dump(message)
        packed = pickler.size.to_bytes(8, "little") + file.getvalue()
        if not pickler.arrays:
            with self._lock:
                self._connection.send_bytes(packed)
            return
        descriptor = share_bytes(*pickler.arrays)
        try:
            with self._lock:
                self._connection.send_bytes(packed)
                reduction.send_handle(self._connection, descriptor, os.getpid())
        finally:
            os.close(descriptor)

    def receive(self) -> Any:
        """Return the next message; its large arrays are views of memory that lives as long as any of them. Raises
        EOFError or OSError once the other end is closed."""
        packed = self._connection.recv_bytes()
        size = int.from_bytes(packed[:8], "little")
        memory = shared_bytes(reduction.recv_handle(self._connection), size) if size else None
        return _MemoryUnpickler(io.BytesIO(packed[8:]), memory).load()

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class _MemoryPickler(pickle.Pickler):
    """Pickles without large arrays: `arrays` are to be laid out consecutively in `size` bytes of memory."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.arrays: list[Bytes] = []
        self.size = 0

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not np.ndarray or value.nbytes < APART_BYTES or value.dtype.hasobject:
            return NotImplemented
        start = self.size
        self.arrays.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        self.size += _aligned(value.nbytes)
        return _array_at, (start, value.dtype, value.shape)


class _MemoryUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Bytes | None) -> None:
        super().__init__(file)
        self._view = partial(_view, memory)  # a method would keep the memory until the next garbage collection

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._view if found is _array_at else found


def _array_at(start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Placeholder of a large array in a message."""
    raise pickle.UnpicklingError("a message with memory of its own was read without a Link")


def _view(memory: Bytes | None, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if memory is None:
        raise pickle.UnpicklingError("a message came without the memory that belongs to it")
    return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


def share_bytes(*buffers: Bytes) -> int:
    """Return a descriptor of memory with a copy of the buffers, each at a multiple of 64 bytes (at least one byte)."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        size = max(sum(_aligned(buffer.size) for buffer in buffers), 1)
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as memory:
            start = 0
            for buffer in buffers:
                memory[start : start + buffer.size] = np.ascontiguousarray(buffer).data
                start += _aligned(buffer.size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def shared_bytes(descriptor: int, total_bytes: int) -> Bytes:
    """Return the memory behind a descriptor, and close the descriptor. Stays mapped as long as the array lives."""
    try:
        memory = mmap.mmap(descriptor, max(total_bytes, 1))
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, np.uint8, count=total_bytes)
