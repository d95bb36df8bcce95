"""Virtual time: what is to happen, in order. Owns the queue; equal times keep the order in which they were set."""

import heapq
import math
from collections.abc import Callable


class Clock:
    """Starts at 0 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0  # that happened
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        """Not before now; never at an infinite time."""
        if at_s < math.inf:
            self._serial += 1
            heapq.heappush(self._queue, (max(at_s, self.now_s), self._serial, act))

    def run(self, until: Callable[[], bool], end_s: float = math.inf) -> None:
        """Let things happen until `until()` holds (asked before each), nothing is left, or `end_s` is reached."""
        queue = self._queue
        while not until():
            if not queue or queue[0][0] > end_s:
                self.now_s = max(self.now_s, end_s) if end_s < math.inf else self.now_s
                return
            self.now_s, _, act = heapq.heappop(queue)
            self.events += 1
            act()
