"""Virtual time: a queue of events, in order. Events with equal times keep the order in which they were set."""

import heapq
import math
from collections.abc import Callable
from typing import Any


class Clock:
    """A virtual clock that starts at 0 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0  # number of events so far
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def at(self, at_s: float, act: Callable[..., None], *given: Any) -> None:
        """Call `act(*given)` at that time, like asyncio's call_at: not before now; never if the time is infinite."""
        if at_s < math.inf:
            self._serial += 1
            heapq.heappush(self._queue, (max(at_s, self.now_s), self._serial, act, given))

    def run(self, until: Callable[[], bool], end_s: float = math.inf) -> None:
        """Process events until `until()` is true (checked before each), none is left, or `end_s` is reached."""
        while not until():
            if not self._next(end_s):
                return

    def run_to(self, end_s: float) -> None:
        """Process every event set for `end_s` or before."""
        while self._next(end_s):
            pass

    def _next(self, end_s: float) -> bool:
        """Process one event and return true. If none is left, set the time to `end_s`."""
        queue = self._queue
        if not queue or queue[0][0] > end_s:
            self.now_s = max(self.now_s, end_s) if end_s < math.inf else self.now_s
            return False
        self.now_s, _, act, given = heapq.heappop(queue)
        self.events += 1
        act(*given)
        return True
