"""Wakes a thread that polls sockets. Owns one pipe."""

import contextlib
import os


class Waker:
    """`wake` from any thread, at any time, never blocks; the polling thread registers `fd` and calls `clear`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._closed = False

    def wake(self) -> None:
        if not self._closed:
            with contextlib.suppress(OSError):  # full: it is awake already
                os.write(self._write_fd, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """By the polling thread, as its last act."""
        self._closed = True
        os.close(self.fd)
        os.close(self._write_fd)
