"""What is measured of the strategies at one range of batch sizes: arms, their holds and what they are worth.

Owns the measurements and the value that follows from them; never decides what is decoded with next.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from policies.speculation.costs import PlainCost
from policies.speculation.strategy import Strategy

MARGIN = 0.03  # an arm must beat plain decoding by this: the largest of several noisy means is too large
FELL, FELL_TOKENS, FELL_HOLDS = 0.7, 512, 3  # an arm has changed when so much text gains less than this of its value
FIRST_WAIT_STEPS = 64
SURE_TRIES = 3  # before them an arm that loses is tried again soon: the machine may have interrupted its trial


@dataclass(frozen=True, slots=True)
class ArmBelief:
    """What is known of an arm in a bucket of batch sizes [first, last]."""

    strategy: Strategy
    first: int
    last: int
    holds: int
    reward: float | None  # speed-up against plain decoding; None: never tried


# ((running requests, tokens per request), ...), seconds, and the engine step at its end
Hold = tuple[tuple[tuple[int, float], ...], float, int]


@dataclass(slots=True, kw_only=True)
class Arm:
    strategy: Strategy
    holds: deque[Hold]
    tries: int = 0
    seen_steps: int = 0  # engine steps since what is known of it began
    value: float | None = None
    wait_steps: int = FIRST_WAIT_STEPS
    due_step: int = 0

    def judge(self, cost: PlainCost) -> None:
        """Holds keep tokens, not gains, so that a plain cost that was measured badly, or changed, spoils none."""
        if self.holds:
            self.value = speedup(self.holds, cost)

    def changed(self, cost: PlainCost) -> bool:
        """Its last holds are far from its window, which loses the older ones: the world has changed."""
        recent: list[Hold] = []
        for hold in reversed(self.holds):
            recent.append(hold)
            tokens = sum(running * count for parts, _, _ in recent for running, count in parts)
            if tokens >= FELL_TOKENS and len(recent) >= FELL_HOLDS:
                break
        if self.value is None or 2 * len(recent) > len(self.holds):
            return False
        if FELL * self.value < speedup(recent, cost) < self.value / FELL:
            return False
        self.holds = deque(reversed(recent), self.holds.maxlen)
        self.judge(cost)
        return True

    def forget(self) -> None:
        self.holds.clear()
        self.value, self.seen_steps = None, 0


def speedup(holds: Collection[Hold], cost: PlainCost) -> float:
    """Of all holds, of a few all but the worst: one that the machine interrupted must not spoil an arm."""
    parts = [
        (sum(tokens * (cost.at(running) or 0.0) for running, tokens in decoded), elapsed_s)
        for decoded, elapsed_s, _ in holds
    ]
    if 3 <= len(parts) < 8:
        parts.remove(min(parts, key=lambda part: part[0] / part[1]))
    return sum(gain_s for gain_s, _ in parts) / sum(elapsed_s for _, elapsed_s in parts)


@dataclass(slots=True)
class Bucket:
    number: int
    plain: Arm
    arms: list[Arm] = field(default_factory=list)  # most promising first, plain decoding not among them
    newcomers: dict[str, int] = field(default_factory=dict)  # drafters never tried here: looks at them, so far in vain

    def best(self) -> Arm:
        best, value = self.plain, 1.0 + MARGIN
        for arm in self.arms:
            if arm.value is not None and arm.value > value:
                best, value = arm, arm.value
        return best

    def quiet(self) -> bool:
        """Every drafter was tried enough, and plain decoding is the best."""
        tried = {arm.strategy.drafter for arm in self.arms if arm.value is not None and arm.tries >= SURE_TRIES}
        return self.best() is self.plain and all(arm.strategy.drafter in tried for arm in self.arms)
