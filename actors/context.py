"""What every part of a driver is given: the loop in which it waits, who is told what happens, and the clocks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.loop import EventLoop


class RunObserver:
    """Receives what actors report. This one keeps nothing; a run's is launch.observe.Observer."""

    def event(self, kind: str, message: str) -> None:
        """Something worth knowing happened; kind is one word."""

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """How far what is under way has come; total 0: nobody knows."""

    def worked(self, actor: str, kind: str, start_s: float, end_s: float) -> None:
        """For the timeline; seconds since the epoch."""


def no_log(name: str) -> str | None:
    return None


UNOBSERVED = RunObserver()


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
