"""What every part of a driver is given: the loop in which it waits, who is told what happens, and the clocks."""

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
        """Monotonic."""
        return self.loop.clock

    def check(self) -> None:
        """For whoever waits long: raises where the run was asked to stop."""
