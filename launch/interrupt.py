"""Ctrl-C and SIGTERM as a flag that the training loop reads between its phases. It never stops anything itself."""

import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from actors.observer import RunObserver


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """The user or the cluster asked the run to stop. Raised where stopping loses nothing."""


class Interrupt:
    """Set by the first signal; a second Ctrl-C raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.requested = False
        self.signal_name = ""
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()  # put is reentrant: signal handlers may call it

    def when_asked(self, observer: RunObserver) -> None:
        """Tell it at the first request, on a thread of its own: a signal handler may hold no lock."""
        threading.Thread(target=self._tell, args=(observer,), name="interrupt", daemon=True).start()

    def _tell(self, observer: RunObserver) -> None:
        observer.stopping(self._asked.get())

    def __bool__(self) -> bool:
        return self.requested

    def check(self) -> None:
        if self.requested:
            raise Interrupted(self.signal_name)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        if not self.requested:
            self._asked.put(self.signal_name)
        self.requested = True


@contextmanager
def interrupt_flag() -> Iterator[Interrupt]:
    """Route SIGINT and SIGTERM to a flag inside the block. Must be entered on the main thread."""
    flag = Interrupt()
    previous = {number: signal.signal(number, flag._handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
