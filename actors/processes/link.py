"""One end of the socket between a supervisor and its child: pickled messages, and arrays as shared memory.

An array travels as an anonymous memory file whose descriptor is sent over the socket: it has no name that could be left
behind, and its memory is free once both sides have closed it, however they end.
"""

import mmap
import os
import tempfile
import threading
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Message = tuple[Any, Bytes | None]  # what was sent, and the memory that came with it


class Link:
    """Sending is thread-safe; receiving is for one thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # A message and its descriptor must stay together.

    def send(self, message: object, memory: Bytes | None = None) -> None:
        """`memory` is copied once and may be reused when this returns. Raises OSError if the other end is closed."""
        if memory is None:
            with self._lock:
                self._connection.send((message, None))
            return
        descriptor = share_bytes(memory)
        try:
            with self._lock:
                self._connection.send((message, memory.size))
                reduction.send_handle(self._connection, descriptor, os.getpid())
        finally:
            os.close(descriptor)

    def receive(self) -> Message:
        """The next message. Raises EOFError or OSError once the other end is closed."""
        message, size = self._connection.recv()
        memory = None if size is None else shared_bytes(reduction.recv_handle(self._connection), size)
        return message, memory

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def share_bytes(buffer: Bytes) -> int:
    """A descriptor of memory that holds a copy of `buffer` (at least one byte)."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        size = max(buffer.size, 1)
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as memory:
            memory[: buffer.size] = np.ascontiguousarray(buffer).data
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def shared_bytes(descriptor: int, total_bytes: int) -> Bytes:
    """The memory behind a descriptor, which is closed. Stays mapped as long as the array lives."""
    try:
        memory = mmap.mmap(descriptor, max(total_bytes, 1))
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, np.uint8, count=total_bytes)
