"""What one measured strategy says about another of the same drafter. Owns a drafter's acceptance rate and row cost.

A chain whose tokens are each accepted with probability p, while all before them were, yields a(d) = p + ... + p^d at
depth d; a drafted row costs about the same time wherever it is. Both are rough, and serve only to decide what is worth
a trial first: arms are judged by what is measured.
"""

from dataclasses import dataclass

from policies.speculation.strategy import Strategy

_FOLLOW = 0.3  # weight of the newest hold


@dataclass(slots=True)
class DrafterProfile:
    """Estimates; None before the first hold."""

    rate: float | None = None  # p
    row_s: float = 0.0  # seconds per drafted row, drafting included

    def learn(self, strategy: Strategy, running: float, accepted: float, extra_s: float) -> None:
        """A hold's means per step: accepted tokens per request, and seconds beyond a plain step."""
        rate = acceptance_rate(accepted, strategy.depth)
        row_s = max(extra_s, 0.0) / (running * strategy.tokens_to_verify)
        if self.rate is None:
            self.rate, self.row_s = rate, row_s
        else:
            self.rate += _FOLLOW * (rate - self.rate)
            self.row_s += _FOLLOW * (row_s - self.row_s)

    def predict(self, strategy: Strategy, running: int, plain_s: float) -> float | None:
        """Expected speed-up of a strategy against plain decoding."""
        if self.rate is None:
            return None
        accepted = sum(self.rate**depth for depth in range(1, strategy.depth + 1))
        return (1 + accepted) * plain_s / (plain_s + self.row_s * running * strategy.tokens_to_verify)


def acceptance_rate(accepted: float, depth: int) -> float:
    """The p in [0, 1] with p + ... + p^depth = accepted."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, depth + 1)) < accepted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
