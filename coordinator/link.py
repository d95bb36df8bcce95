"""Exactly-once, in-order delivery of one peer's messages despite loss, repetition and reordering. No sockets, no clock.

The peer numbers its messages and repeats all that are not acknowledged (go-back-n); the coordinator accepts the next
number only. An opening message (Register, or a driver's report) holds the whole state, so it may skip numbers: earlier
messages no longer matter.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from contracts.coordinator import DriverEvent, Register, RolloutComplete, RolloutStarted, WorkerEvent
from coordinator.wire import Ack, Say

REPEAT_S = 0.25
WINDOW = 32


def opens(say: Say) -> bool:
    return isinstance(say.event, Register | RolloutStarted | RolloutComplete)


class Fate(Enum):
    """A message's handling by the coordinator's end."""

    NEW = "heard"  # apply it and acknowledge
    REPEATED = "repeated"  # the last one again: repeat its acknowledgement
    REPLAYED = "replayed"  # an older one: ignore
    GAP = "gap"  # one before it is missing: ignore, the peer repeats both
    UNOPENED = "unopened"  # no opening message yet: request one
    OUTDATED = "outdated"  # of a process that a later one has replaced: ignore
    IMPOSTOR = "impostor"  # sent in another peer's name: ignore
    STRANGER = "stranger"  # no worker of this run: ignore, store nothing


@dataclass(slots=True)
class Inlink:
    """The coordinator's end. An open one has received all messages up to `number`."""

    incarnation: int = -1
    number: int = -1
    is_open: bool = False
    error: str = ""  # sent with the last acknowledgement

    def judge(self, say: Say) -> Fate:
        """Return the fate of a message. Changes nothing; `take` does."""
        if say.incarnation < self.incarnation:
            return Fate.OUTDATED
        if say.incarnation > self.incarnation:
            return Fate.NEW if opens(say) else Fate.UNOPENED
        if say.number <= self.number:
            return Fate.REPEATED if say.number == self.number and self.is_open else Fate.REPLAYED
        if opens(say):
            return Fate.NEW
        if not self.is_open:
            return Fate.UNOPENED
        return Fate.NEW if say.number == self.number + 1 else Fate.GAP

    def take(self, say: Say) -> None:
        """Accept a message whose fate is NEW."""
        self.incarnation, self.number, self.error, self.is_open = say.incarnation, say.number, "", True

    def close(self) -> None:
        """Forget the worker: it must reopen the link. Older numbers still count as replays."""
        self.is_open = False


class Outlink:
    """The peer's end. `say` returns each message for sending once; `repeats` returns it again."""

    def __init__(self, incarnation: int, now_s: float) -> None:
        self.incarnation = incarnation
        self.number = -1  # of the last message
        self.alive_s = now_s  # send time of the latest acknowledged message
        self._unheard: deque[tuple[Say, float]] = deque()
        self._repeat_at_s = math.inf

    @property
    def waits(self) -> bool:
        return bool(self._unheard)

    @property
    def due_s(self) -> float:
        """Return when `repeats` has something to send."""
        return self._repeat_at_s if self._unheard else math.inf

    def say(self, event: WorkerEvent | DriverEvent, now_s: float) -> Say:
        self.number += 1
        say = Say(self.incarnation, self.number, event)
        if opens(say):
            self._unheard.clear()
        if not self._unheard:
            self._repeat_at_s = now_s + REPEAT_S
        self._unheard.append((say, now_s))
        return say

    def hear(self, ack: Ack, now_s: float) -> None:
        while self._unheard and self._unheard[0][0].number <= ack.number:
            self.alive_s = max(self.alive_s, self._unheard.popleft()[1])
            self._repeat_at_s = now_s + REPEAT_S

    def repeats(self, now_s: float) -> list[Say]:
        """Return the messages to repeat now, at most WINDOW: the coordinator accepts them in order only."""
        if now_s < self.due_s:
            return []
        self._repeat_at_s = now_s + REPEAT_S
        return [say for say, _ in islice(self._unheard, WINDOW)]
