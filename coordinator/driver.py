"""The driver's end of its link. It reports whether a rollout is running. No sockets, no clock.

It reports its state at every change and with every heartbeat, so a restarted coordinator need not request it.
"""

import math

from config.coordinator import CoordinatorOptions
from contracts.coordinator import DriverEvent
from coordinator.link import Outlink
from coordinator.wire import Ack, Say, Tell


class Driver:
    """The driver's reports. incarnation: above that of any earlier driver (a start time suffices)."""

    def __init__(self, incarnation: int, options: CoordinatorOptions, now_s: float) -> None:
        self._options = options
        self._link = Outlink(incarnation, -math.inf)
        self._beat_at_s = now_s + options.heartbeat_s
        self._state: DriverEvent | None = None
        self._out: list[Say] = []
        self.term = 0

    def report(self, state: DriverEvent, now_s: float) -> None:
        self._state = state
        self._beat_at_s = now_s + self._options.heartbeat_s
        self._out.append(self._link.say(state, now_s))

    @property
    def due_s(self) -> float:
        """Return when `tick` has something to do, in seconds of the caller's clock."""
        return min(self._beat_at_s, self._link.due_s)

    def connected(self, now_s: float) -> bool:
        """Return whether the coordinator has acknowledged a message lately."""
        return now_s < self._link.alive_s + self._options.lease_s

    def take(self) -> list[Say]:
        """Return the messages to send, and forget them."""
        out, self._out = self._out, []
        return out

    def hear(self, message: Ack | Tell, now_s: float) -> None:
        if isinstance(message, Ack) and message.incarnation == self._link.incarnation:
            self.term = max(self.term, message.term)
            self._link.hear(message, now_s)

    def tick(self, now_s: float) -> None:
        """Do what is due. Call it at `due_s`; calls at other times have no effect."""
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._options.heartbeat_s
            if self._state is not None and not self._link.waits:
                self._out.append(self._link.say(self._state, now_s))
        self._out += self._link.repeats(now_s)
