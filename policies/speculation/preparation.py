"""What it takes to make a drafter ready for new weights of the target, and how long that will serve.

A copy of the target is made anew at its first draft after every update. The rest of the rollouts with these weights
must earn that price back. How long weights serve is known from the updates before; of the first ones it is a guess.
"""

from collections import deque

REMEMBERED = 8  # updates
FIRST_STEPS = 256  # plain steps that the first weights are expected to serve
PATIENCE = 4.0  # prices that the first weights have served
LONGER = 1.0  # of the time that weights have served: what they serve beyond all that is known


class Preparation:
    """Of one engine; seconds are those of its decoding steps."""

    def __init__(self) -> None:
        self._lasted: deque[float] = deque(maxlen=REMEMBERED)  # seconds that weights served
        self._served_s = 0.0  # by those at hand
        self._ready: set[str] = set()  # drafters

    def new_target(self) -> None:
        """Other weights from now on."""
        if self._served_s > 0.0:
            self._lasted.append(self._served_s)
        self._served_s = 0.0
        self._ready.clear()

    def decoded(self, seconds: float) -> None:
        """A decoding step took so long."""
        self._served_s += seconds

    def drafted(self, drafter: str) -> None:
        """It is ready for the weights at hand."""
        self._ready.add(drafter)

    def ready(self, drafter: str) -> bool:
        """Whether it has drafted for the weights at hand."""
        return drafter in self._ready

    def remaining_s(self, price_s: float, plain_s: float, *, known: bool) -> float:
        """Seconds that the weights at hand will still serve, on average; plain_s: of a plain step. Not `known`: what
        drafts take is a guess, and nothing is paid before the first weights have served for a while."""
        served = self._served_s
        if not self._lasted:
            if not known and served < PATIENCE * price_s:
                return 0.0
            return max(FIRST_STEPS * plain_s - served, LONGER * served)
        left = [lasted - served for lasted in self._lasted if lasted > served]
        return (sum(left) + LONGER * served) / (len(left) + 1)
