"""Wakes a thread that polls sockets. Owns one pipe."""

import contextlib
import os
import threading


class Waker:
    """`wake` from any thread, at any time, never blocks; the polling thread registers `fd` and calls `clear`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._lock = threading.Lock()  # prevents a write to a descriptor that was closed and reused
        self._closed = False

    def wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # full: already awake
            if not self._closed:
                os.write(self._write_fd, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Close the pipe. The polling thread calls it last."""
        with self._lock:
            self._closed = True
            os.close(self.fd)
            os.close(self._write_fd)
