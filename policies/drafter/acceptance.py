"""Acceptance as counts per strategy. Owns how two of them are compared, and when a difference is no chance; decides
nothing.

A chain of two is accepted more often than a tree of twelve by the same drafter: only equal strategies are compared, and
what the engine happened to choose cannot look like a drafter that got better or worse.
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

    Strategies count by the Mantel-Haenszel weights n1 n0 / (n1 + n0): one of which either side has seen little says
    little. Tokens of one draft stand or fall together, so a whole draft is one observation; whatever happens inside it,
    its accepted share lies in [0, 1], and its variance is at most r (1 - r).
    """

    level: float  # acceptance now as a share of that before
    error: float  # its standard error
    sigmas: float  # how far it lies above the `share` that was asked for, in standard errors


@dataclass(slots=True)
class AcceptanceTally:
    """Drafted and accepted tokens by strategy, as `str(Strategy)`."""

    counts: dict[str, Counts] = field(default_factory=dict)

    def add(self, strategy: str, drafted: int, accepted: int) -> None:
        """Raises ValueError unless 0 <= accepted <= drafted."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{strategy}: {accepted} of {drafted} drafted tokens cannot be accepted")
        before = self.counts.get(strategy, (0, 0))
        self.counts[strategy] = before[0] + drafted, before[1] + accepted

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.counts.values())

    def with_(self, other: "AcceptanceTally") -> "AcceptanceTally":
        """Both together."""
        both = AcceptanceTally(dict(self.counts))
        for name, (drafted, accepted) in other.counts.items():
            both.add(name, drafted, accepted)
        return both

    def faded(self) -> "AcceptanceTally":
        """Half of it: what was measured long ago counts less and less."""
        return AcceptanceTally({name: (d // 2, min(a // 2, d // 2)) for name, (d, a) in self.counts.items() if d > 1})

    def against(self, before: "AcceptanceTally", share: float = 1.0) -> Comparison | None:
        """None: there is no strategy that both used, or of those nothing was ever accepted."""
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
        if not before_rate:  # All is better than nothing, but by how much no number says.
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
    variance: float  # of `share`, at most

    @classmethod
    def of(cls, strategy: str, drafted: int, accepted: int) -> "_Rate":
        drafts = drafted / Strategy.parse(strategy).tokens_to_verify
        if not drafts:
            return cls(0.0, 0.0, 0.0)
        share = accepted / drafted
        likely = (share * drafts + 1) / (drafts + 2)  # few drafts that all failed do not make a certainty
        return cls(drafts, share, likely * (1 - likely) / drafts)
