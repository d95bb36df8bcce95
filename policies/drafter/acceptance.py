"""Acceptance as counts per strategy: how two tallies are compared, and when a difference is significant. Decides
nothing.

The same drafter's chain of two is accepted more often than its tree of twelve. So only equal strategies are compared,
and the engine's choice of strategies cannot look like a better or worse drafter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from config.strategy import Strategy

Counts = tuple[int, int]  # (drafted, accepted) tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """Acceptance now against acceptance before, over the strategies that both used.

    Strategies count by the Mantel-Haenszel weights n1 n0 / (n1 + n0), so one with little data on either side has little
    weight. Tokens of one draft depend on each other, so a whole draft is one observation. Its accepted share r lies in
    [0, 1], so its variance is at most r (1 - r).
    """

    level: float  # acceptance now as a share of that before
    error: float  # its standard error
    sigmas: float  # its distance above the given `share`, in standard errors


@dataclass(slots=True)
class AcceptanceTally:
    """Drafted and accepted tokens by strategy, as `str(Strategy)`."""

    counts: dict[str, Counts] = field(default_factory=dict)

    def add(self, strategy: str, drafted: int, accepted: int) -> None:
        """Add counts. Raises ValueError unless 0 <= accepted <= drafted."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{strategy}: {accepted} of {drafted} drafted tokens cannot be accepted")
        before = self.counts.get(strategy, (0, 0))
        self.counts[strategy] = before[0] + drafted, before[1] + accepted

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.counts.values())

    def with_(self, other: "AcceptanceTally") -> "AcceptanceTally":
        """Return the sum of both."""
        both = AcceptanceTally(dict(self.counts))
        for name, (drafted, accepted) in other.counts.items():
            both.add(name, drafted, accepted)
        return both

    def faded(self) -> "AcceptanceTally":
        """Return half of the counts, so that old measurements lose weight."""
        return AcceptanceTally({name: (d // 2, min(a // 2, d // 2)) for name, (d, a) in self.counts.items() if d > 1})

    def against(self, before: "AcceptanceTally", share: float = 1.0) -> Comparison | None:
        """Compare with an earlier tally. None if no strategy is in both, or none was ever accepted in either."""
        score = variance = now_rate = before_rate = 0.0
        for name in sorted(self.counts.keys() & before.counts.keys()):
            now, then = _Rate.of(name, *self.counts[name]), _Rate.of(name, *before.counts[name])
            if not now.drafts or not then.drafts:
                continue
            weight = now.drafts * then.drafts / (now.drafts + then.drafts)
            now_rate += weight * now.share
            before_rate += weight * then.share
            score += weight * (now.share - share * then.share)
            variance += weight**2 * (now.variance + share**2 * then.variance)
        if not now_rate and not before_rate:
            return None
        if not before_rate:  # any acceptance is better, but there is no ratio to none
            return Comparison(math.inf, math.inf, score / math.sqrt(variance))
        return Comparison(now_rate / before_rate, math.sqrt(variance) / before_rate, score / math.sqrt(variance))

    def to_json(self) -> dict[str, list[int]]:
        return {name: list(counts) for name, counts in self.counts.items()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "AcceptanceTally":
        return cls({name: (int(drafted), int(accepted)) for name, (drafted, accepted) in found.items()})


@dataclass(frozen=True, slots=True)
class _Rate:
    drafts: float
    share: float  # accepted of drafted tokens
    variance: float  # of `share`, upper bound

    @classmethod
    def of(cls, strategy: str, drafted: int, accepted: int) -> "_Rate":
        drafts = drafted / Strategy.parse(strategy).tokens_to_verify
        if not drafts:
            return cls(0.0, 0.0, 0.0)
        share = accepted / drafted
        likely = (share * drafts + 1) / (drafts + 2)  # few failed drafts are no certainty
        return cls(drafts, share, likely * (1 - likely) / drafts)
