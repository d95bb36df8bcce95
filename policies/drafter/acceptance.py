"""Acceptance as counts per strategy. Owns how two of them are compared; decides nothing.

A chain of two is accepted more often than a tree of twelve by the same drafter: only equal strategies are compared, and
what the engine happened to choose cannot look like a drafter that got better or worse.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Counts = tuple[int, int]  # (drafted, accepted) tokens
Rates = Mapping[str, float]  # by strategy, accepted of drafted


@dataclass(slots=True)
class Tally:
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

    def rates(self) -> dict[str, float]:
        return {name: accepted / drafted for name, (drafted, accepted) in self.counts.items() if drafted}

    def against(self, rates: Rates) -> tuple[int, int, float]:
        """(drafted, accepted, accepted as `rates` predict), over the strategies that `rates` knows."""
        common = list(self._common(rates))
        drafted, accepted = sum(d for _, d, _ in common), sum(a for _, _, a in common)
        return drafted, accepted, sum(rates[name] * d for name, d, _ in common)

    def _common(self, rates: Rates) -> Iterator[tuple[str, int, int]]:
        return ((name, *counts) for name, counts in sorted(self.counts.items()) if name in rates)
