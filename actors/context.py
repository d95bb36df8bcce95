"""Context of the driver's parts: the event loop, the observer, log files, and the clocks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.loop import EventLoop
from actors.observer import UNOBSERVED, RunObserver


def no_log(name: str) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Context:
    loop: EventLoop = field(default_factory=EventLoop)
    observer: RunObserver = UNOBSERVED
    log: Callable[[str], str | None] = no_log  # the log file of an actor
    wall: Callable[[], float] = time.time

    @property
    def clock(self) -> Callable[[], float]:
        """The monotonic clock, in seconds."""
        return self.loop.clock

    def check(self) -> None:
        """Raise if a stop was requested. Long waits call it."""
