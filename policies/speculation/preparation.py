"""The preparation of a drafter for new target weights, and how long these will serve.

A copy of the target is made again at its first draft after every update. The remaining rollouts with these weights must
earn back that cost. The lifetime of weights is estimated from earlier updates; for the first ones it is a guess.
"""

from collections import deque

REMEMBERED = 8  # updates
FIRST_STEPS = 256  # plain steps that the first weights are expected to serve
PATIENCE = 4.0  # multiples of the price that the first weights must have served
LONGER = 1.0  # of the time served so far: expected rest beyond all known lifetimes


class Preparation:
    """The preparation in one engine. Seconds are those of its decoding steps."""

    def __init__(self) -> None:
        self._lasted: deque[float] = deque(maxlen=REMEMBERED)  # lifetimes of weights in seconds
        self._served_s = 0.0  # by the present weights
        self._ready: set[str] = set()  # drafters

    def new_target(self) -> None:
        """The target's weights have changed."""
        if self._served_s > 0.0:
            self._lasted.append(self._served_s)
        self._served_s = 0.0
        self._ready.clear()

    def decoded(self, seconds: float) -> None:
        """A decoding step took `seconds`."""
        self._served_s += seconds

    def drafted(self, drafter: str) -> None:
        """The drafter is ready for the present weights."""
        self._ready.add(drafter)

    def ready(self, drafter: str) -> bool:
        """Whether it has drafted for the present weights."""
        return drafter in self._ready

    def remaining_s(self, price_s: float, plain_s: float, *, known: bool) -> float:
        """Return the expected remaining seconds of the present weights. plain_s: of a plain step. Not `known`: drafts
        were never timed, so nothing is paid before the first weights have served for a while."""
        served = self._served_s
        if not self._lasted:
            if not known and served < PATIENCE * price_s:
                return 0.0
            return max(FIRST_STEPS * plain_s - served, LONGER * served)
        left = [lasted - served for lasted in self._lasted if lasted > served]
        return (sum(left) + LONGER * served) / (len(left) + 1)
