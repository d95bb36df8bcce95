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
        self._lock = threading.Lock()  # nobody writes to a descriptor that is somebody else's by now
        self._closed = False

    def wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it is awake already
            if not self._closed:
                os.write(self._write_fd, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """By the polling thread, as its last act."""
        with self._lock:
            self._closed = True
            os.close(self.fd)
            os.close(self._write_fd)
